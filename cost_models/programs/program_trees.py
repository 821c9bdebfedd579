"""ProgramTrees: boosted trees on how much longer each leaf of a program takes than its scale.

    latency = sum over leaves of scale * exp(sum of trees)

so that what a leaf is like corrects that leaf's share alone. The loss is a pseudo-Huber of ln,
twice as steep above as below, since a time that is predicted too long costs more relative error
than one too short; a leaf's slope is the program's times the share of the leaf. Fitted by XGBoost,
evaluated by numba from plain arrays (`tree_ensemble`). GPUs and CPUs have trees of their own: what
slows one down says nothing of the other. CPUs have two forests, whose mean is taken: one that does
not see how large a leaf is, which is better for some tasks unlike those of training, and one that
does, which is better for tasks that were trained on. On GPUs the mean is with perceptrons
(`program_perceptrons`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.programs.program_inputs import FLAT_NAMES, ProgramInputs
from foreplan.cost_models.programs.program_perceptrons import ProgramPerceptrons
from foreplan.cost_models.tree_ensemble import TreeEnsemble

Floats = NDArray[np.float64]

#: What says how much there is of a CPU's leaf, not what it is like: trees that see it know training
#: tasks by their sizes. Shares of the parts say the same of unseen tasks.
_SIZES = re.compile(
    r"program\.(?!share).*|leaf\.(ln\..*|ln_seconds)|leaf\.(gpu|bindings)\..*"
    r"|leaf\.arithmetic\.(?!flops_per_iteration).*"
    r"|leaf\.(?!share).*(traffic|crowded|unique_bytes|stored_bytes|job_bytes|thread_bytes|unique_lines"
    r"|requests|iterations|serial|spatial|per_job|parallel).*|leaf\.(store|load\d)\.bytes"
    r"|leaf\.code\.(flops|quotients|functions|address_operations|divisions|chained|inner_starts"
    r"|repeated)|leaf\.block\.(bodies|operations|beside|broadcast|gathered|results|apart"
    r"|hoisted_apart|spilled|chained|divisions)"
)


class _Forest(NamedTuple):
    """Trees of a kind of device, and the columns that they see."""

    cpu: bool
    columns: NDArray[np.int64]


_ALL = np.arange(len(FLAT_NAMES))
_SIZELESS = np.array([n for n, name in enumerate(FLAT_NAMES) if not _SIZES.fullmatch(name)])
#: By name. Both forests of CPUs, and their settings, were chosen on the development families.
_FORESTS = {
    "gpu": _Forest(cpu=False, columns=_ALL),
    "cpu": _Forest(cpu=True, columns=_SIZELESS),
    "cpu_sizes": _Forest(cpu=True, columns=_ALL),
}
#: Trees of CPUs are deeper than those of GPUs by so many levels; half as many learn twice as fast.
_CPU_DEEPER, _CPU_FEWER = 2, 2
#: Width of the loss's round foot, its slope above and below. Chosen on the development families.
_WIDTH, _ABOVE, _BELOW = 0.3, 1.6, 0.8
#: Most that trees make of a leaf, as a logarithm.
_MOST = 6.0
#: Programs of GPUs from which on they have perceptrons, too (assumed: these have 200,000 weights).
LEAST_PROGRAMS = 1000
_BESIDE = "perceptrons."


class ProgramTrees:
    """Trees over `ProgramInputs.flat`, those of GPUs and those of CPUs.

    Build it with `fit`, or from the `arrays` of a fitted one (`from_arrays`).

    Args:
        ensembles: by name of the forest; leaves of a kind of device without trees stay as they are.
        perceptrons: beside the trees of GPUs, if there are such.
    """

    def __init__(
        self,
        ensembles: Mapping[str, TreeEnsemble],
        perceptrons: ProgramPerceptrons | None = None,
    ) -> None:
        self.ensembles = dict(ensembles)
        self.perceptrons = perceptrons

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """Build from what `arrays` gave.

        Raises:
            KeyError: an array is missing.
        """
        found = {}
        for name in _FORESTS:
            prefix = f"{name}."
            own = {k[len(prefix) :]: v for k, v in arrays.items() if k.startswith(prefix)}
            if own:
                found[name] = TreeEnsemble(own)
        if not found:
            raise KeyError("trees of no kind of device")
        own = {k[len(_BESIDE) :]: v for k, v in arrays.items() if k.startswith(_BESIDE)}
        return cls(found, ProgramPerceptrons(own) if own else None)

    @classmethod
    def fit(
        cls,
        inputs: ProgramInputs,
        latency_s: Floats,
        *,
        rounds: int,
        depth: int,
        learning_rate: float,
        threads: int,
        seed: int,
        start_s: Floats | None = None,
        perceptron_epochs: int = 0,
    ) -> Self:
        """Fit trees; see `ProgramPredictor` for the settings.

        Args:
            inputs: of the training programs.
            latency_s: labels (N).
            rounds: trees.
            depth: of a tree on GPUs; on CPUs two more, and half the rounds at twice the rate.
            learning_rate: of boosting.
            threads: of XGBoost.
            seed: of the sampling of rows and features.
            start_s: seconds of leaves to correct (M); their scale by default.
            perceptron_epochs: passes of perceptrons over programs of GPUs, which correct the scale;
                0, and of fewer than `LEAST_PROGRAMS` programs, for none.
        """
        settings = {
            "base_score": 0.0, "subsample": 0.7, "colsample_bytree": 0.4, "min_child_weight": 5.0,
            "max_bin": 128, "tree_method": "hist", "nthread": threads, "seed": seed,
            "disable_default_eval_metric": True,
        }  # fmt: skip
        start, flat = inputs.leaf_s if start_s is None else start_s, inputs.flat
        found = {}
        for name, forest in _FORESTS.items():
            chosen = inputs.cpu == forest.cpu
            rows = chosen[inputs.program]
            if rows.any():
                fewer = _CPU_FEWER if forest.cpu else 1
                deeper = _CPU_DEEPER if forest.cpu else 0
                found[name] = _boosted(
                    settings | {"max_depth": depth + deeper, "eta": learning_rate * fewer},
                    -(-rounds // fewer), flat[rows][:, forest.columns], start[rows],
                    inputs.program[rows], np.log(latency_s[chosen]),
                )  # fmt: skip
        beside = None
        if perceptron_epochs and (~inputs.cpu).sum() >= LEAST_PROGRAMS:
            beside = ProgramPerceptrons.fit(
                inputs.of_gpus(), latency_s[~inputs.cpu], epochs=perceptron_epochs, seed=seed
            )
        return cls(found, beside)

    def predict(self, inputs: ProgramInputs) -> Floats:
        """Return ln(latency / scale) of leaves (M): the mean of what a kind of device has."""
        found, flat = np.zeros(len(inputs.program)), inputs.flat
        for cpu in (False, True):
            rows = (inputs.cpu == cpu)[inputs.program]
            own = [name for name in self.ensembles if _FORESTS[name].cpu == cpu]
            if own and rows.any():
                seen = flat[rows]
                parts = [self.ensembles[n].predict(seen[:, _FORESTS[n].columns]) for n in own]
                if self.perceptrons is not None and not cpu:
                    parts.append(self.perceptrons.predict(seen))
                found[rows] = np.mean(parts, axis=0)
        return np.clip(found, -_MOST, _MOST)

    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """What `from_arrays` reads."""
        found = {
            f"{forest}.{name}": values
            for forest, ensemble in self.ensembles.items()
            for name, values in ensemble.arrays().items()
        }
        if self.perceptrons is not None:
            found |= {f"{_BESIDE}{name}": v for name, v in self.perceptrons.arrays().items()}
        return found


def _boosted(
    settings: Mapping[str, Any], rounds: int, flat: NDArray[np.float32], start_s: Floats,
    program: NDArray[np.int64], target: Floats,
) -> TreeEnsemble:  # fmt: skip
    """Boost on leaves whose programs have ln(latency) ``target``; leaves of one stand together."""
    import xgboost

    starts = np.flatnonzero(np.r_[True, program[1:] != program[:-1]])
    number = np.repeat(np.arange(len(starts)), np.diff(np.r_[starts, len(program)]))

    def slopes(margin: NDArray[np.float32], _: Any) -> tuple[Floats, Floats]:
        leaf_s = start_s * np.exp(np.clip(margin, -_MOST, _MOST))
        total = np.add.reduceat(leaf_s, starts)
        first, second = _slopes(np.log(total) - target)
        share = leaf_s / total[number]
        return first[number] * share, second[number] * share + 1e-6

    data = xgboost.DMatrix(flat, np.zeros(len(start_s)))
    return TreeEnsemble.from_booster(xgboost.train(dict(settings), data, rounds, obj=slopes))


def _slopes(off: Floats) -> tuple[Floats, Floats]:
    """Slope and curvature of the loss at ln(predicted / measured)."""
    root = np.sqrt(1 + (off / _WIDTH) ** 2)
    side = np.where(off > 0, _ABOVE, _BELOW)
    return side * off / root, side * root**-3
