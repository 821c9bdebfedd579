"""Does an indicator order operators as real gradients do? Measured one operator at a time.

For every module and variant the module alone is computed by that variant, with the kernels of the
execution, and the gradients of all parameters are compared with those of fp32 on the same batches.
An indicator is as good as its ranks: Spearman's correlation with the measured perturbation, within
each precision, because precisions lie orders of magnitude apart and would order themselves.
Networks are trained and measured at several states of their training: where errors make gradients
jump at kinks, few samples weigh heavily, and one state's measurement ranks operators at random.

``python -m foreplan.planner.precision.validation`` prints the table of ``docs/results``.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from foreplan.cost_models.quality.gradient_variance import Batch, Omega
from foreplan.cost_models.quality.in_fp32 import in_fp32
from foreplan.datasets.kernels.training_variant import EIGHT_BITS, training_variant
from foreplan.errors import SpecError, told
from foreplan.planner.precision.graph import TrainingGraph
from foreplan.planner.precision.indicator import module_variants, omega_table
from foreplan.planner.precision.spec import Indicator, PrecisionWorkload
from foreplan.planner.precision.task import TrainingTask, training_task

if TYPE_CHECKING:
    import torch

#: Fewest modules whose ranks say anything.
LEAST = 4


@dataclass(frozen=True, slots=True)
class Perturbed:
    """One module computed by one variant.

    Attributes:
        module: its path.
        variant: text of the variant.
        squared: squared distance of all gradients from fp32's, mean over batches.
        relative: the same over the squared norm of fp32's gradients.
    """

    module: str
    variant: str
    squared: float
    relative: float


def measure_perturbations(
    task: TrainingTask, variants: Mapping[str, Iterable[str]], batches: Iterable[Batch]
) -> list[Perturbed]:
    """Gradient perturbation of each module and variant; imports torch.

    Args:
        task: what is trained.
        variants: texts by module; fp32 ones are left out.
        batches: (inputs, target) each; every variant sees the same.

    Raises:
        SpecError: no batch, or a module that cannot be computed by a variant.
    """
    import torch

    from foreplan.planner.precision.execution.modules import apply_variants, remove_precision

    module = task.module().train()
    kept = list(batches)
    if not kept:
        raise SpecError("batches", got=0, expected="at least one")
    buffers = {name: b.clone() for name, b in module.named_buffers()}

    def gradients(batch: Batch) -> torch.Tensor:
        with torch.no_grad():  # running statistics are not what is measured
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
        module.zero_grad(set_to_none=True)
        torch.autograd.backward(task.loss(in_fp32(module(*batch[0])), batch[1]))
        found = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
        return torch.cat(found).double()

    exact = [gradients(batch) for batch in kept]
    whole = float(np.mean([float(g.square().sum()) for g in exact]))
    result = []
    for name, texts in variants.items():
        for text in texts:
            if training_variant(text).output == training_variant(text).forward == "fp32":
                continue
            apply_variants(module, {name: text})
            distances = [
                float((gradients(batch) - g).square().sum())
                for batch, g in zip(kept, exact, strict=True)
            ]
            remove_precision(module)
            squared = float(np.mean(distances))
            result.append(Perturbed(name, text, squared, squared / whole if whole else 0.0))
    return result


def rank_correlation(
    omega: Mapping[str, Mapping[str, float]], measured: Iterable[Perturbed]
) -> dict[str, float]:
    """Spearman's correlation of an indicator with measured perturbations, by precision.

    Args:
        omega: by module and variant.
        measured: from `measure_perturbations`.

    Returns:
        By precision, 8 bits with the dtype of the backward pass (``int8+bf16``), whatever the kind
        of operator; those of fewer than `LEAST` modules are left out, and so are indicators that
        rank all alike.
    """
    from scipy.stats import spearmanr  # type: ignore[import-untyped]

    by_precision: dict[str, list[Perturbed]] = {}
    for row in measured:
        found = training_variant(row.variant)
        eight = found.forward in EIGHT_BITS
        key = f"{found.precision}+{found.backward}" if eight else found.precision
        by_precision.setdefault(key, []).append(row)
    result: dict[str, float] = {}
    for key, rows in by_precision.items():
        ours = [omega[row.module][row.variant] for row in rows]
        if len(rows) >= LEAST and len(set(ours)) > 1:
            result[key] = float(spearmanr(ours, [row.squared for row in rows]).statistic)
    return result


class TrainedTask:
    """A task that starts from weights that were trained; see `TrainingTask`.

    Args:
        task: what it was.
        trained: its module.

    Attributes:
        name: the task's.
    """

    def __init__(self, task: TrainingTask, trained: torch.nn.Module) -> None:
        self.name, self._task, self._trained = task.name, task, trained

    def module(self) -> torch.nn.Module:
        """A copy of the trained module."""
        made: torch.nn.Module = copy.deepcopy(self._trained)
        return made

    def batch(self, step: int, rank: int) -> Batch:
        """As the task's."""
        return self._task.batch(step, rank)

    def loss(self, output: Any, target: Any) -> Any:
        """As the task's."""
        return self._task.loss(output, target)


def trained_states(
    task: TrainingTask, steps: int, states: int, every: int
) -> Iterator[tuple[TrainedTask, float]]:
    """A network at several states of its training in fp32, by AdamW at 1e-3.

    Args:
        task: what is trained, on its batches of rank 0.
        steps: before the first state; 0 = as initialised.
        states: how many.
        every: steps from one to the next.

    Yields:
        The task from there on, and the loss of the batch before.
    """
    import torch

    from foreplan.planner.precision.execution.optimizers import make_optimizer

    module = task.module().train()
    optimizer, last = make_optimizer(module, "adamw", 1e-3), math.nan
    for step in range(steps + (states - 1) * every + 1):
        if step >= steps and (step - steps) % every == 0:
            yield TrainedTask(task, module), last
        inputs, target = task.batch(step, 0)
        optimizer.zero_grad(set_to_none=True)
        loss = task.loss(in_fp32(module(*inputs)), target)
        torch.autograd.backward(loss)
        optimizer.step()
        last = float(loss.detach())


@dataclass(frozen=True, slots=True)
class Setting:
    """A network of the printed table.

    Attributes:
        name, options, batch: of the workload.
        trained: steps before the first state.
        batches: at each state, for the measurement and for the indicators (others).
    """

    name: str
    options: Mapping[str, int]
    batch: int
    trained: int
    batches: int


_SETTINGS: tuple[Setting, ...] = (
    Setting("byte_lm", {"context": 64, "width": 128, "layers": 3, "heads": 4}, 8, 200, 4),
    Setting("digits_mlp", {"width": 256, "layers": 8}, 64, 60, 12),
    Setting("digits_cnn", {"width": 16}, 64, 60, 12),
)
#: States of each training, and steps between them.
_STATES, _EVERY = 6, 10
_INDICATORS: tuple[Indicator, ...] = (
    "gradient_variance", "first_order", "depth_weighted", "hessian", "weight_change", "random",
    "uniform",
)  # fmt: skip
_AGAIN = "measured again"
Correlations = dict[str, dict[str, float]]


def correlations(setting: Setting, seed: int) -> tuple[Correlations, dict[str, int], float]:
    """Rank correlations of every indicator with perturbations, means over states of a training.

    Returns:
        By precision and indicator; modules by precision; the loss at the last state. ``measured
        again`` is the measurement at every other state with that at the rest: the noise.
    """
    work = PrecisionWorkload(
        batch=setting.batch, network=setting.name, network_options=setting.options,
        calibration_batches=setting.batches,
    )  # fmt: skip
    task = training_task(None, work, seed)
    graph = TrainingGraph.of(task)
    variants = module_variants(graph)
    measured: list[list[Perturbed]] = []
    omegas: dict[Indicator, list[Omega]] = {word: [] for word in _INDICATORS}
    losses = []
    for state, (trained, loss) in enumerate(trained_states(task, setting.trained, _STATES, _EVERY)):
        # Batches that neither the training nor the indicators have seen.
        losses.append(loss)
        first = -1000 * (state + 1)
        batches = [task.batch(first - i, 0) for i in range(setting.batches)]
        measured.append(measure_perturbations(trained, variants, batches))
        for word, tables in omegas.items():
            tables.append(omega_table(trained, graph, work, seed, indicator=word))
    rows = _mean_rows(measured)
    again: Omega = {}
    for row in _mean_rows(measured[::2]):
        again.setdefault(row.module, {})[row.variant] = row.squared
    found: Correlations = {}
    for key, value in rank_correlation(again, _mean_rows(measured[1::2])).items():
        found[key] = {_AGAIN: value}
    for word, tables in omegas.items():
        for key, value in rank_correlation(_mean_omega(tables), rows).items():
            found[key][word] = value
    return found, {key: _count(rows, key) for key in found}, losses[-1]


def _mean_rows(states: Sequence[Sequence[Perturbed]]) -> list[Perturbed]:
    return [
        Perturbed(
            same[0].module, same[0].variant, float(np.mean([row.squared for row in same])),
            float(np.mean([row.relative for row in same])),
        )
        for same in zip(*states, strict=True)
    ]  # fmt: skip


def _mean_omega(tables: Sequence[Omega]) -> Omega:
    return {
        name: {text: float(np.mean([table[name][text] for table in tables])) for text in row}
        for name, row in tables[0].items()
    }


def _print_table(seeds: Sequence[int]) -> None:
    """Mean and range of the correlation over seeds of weights and samples, as Markdown."""
    words = (_AGAIN, *_INDICATORS)
    print(f"| network, precision (modules) | {' | '.join(words)} |")
    print("|---|" + "---|" * len(words))
    for setting in _SETTINGS:
        found = [correlations(setting, seed) for seed in seeds]
        for key in found[0][0]:
            cells = [_cell([one[key][w] for one, *_ in found if w in one[key]]) for w in words]
            print(f"| {setting.name}, {key} ({found[0][1][key]}) | {' | '.join(cells)} |")
        losses = ", ".join(f"{loss:.3f}" for *_, loss in found)
        print(f"{setting.name}: training loss at the last state, by seed: {losses}",
              file=sys.stderr, flush=True)  # fmt: skip


def _count(rows: Iterable[Perturbed], key: str) -> int:
    word, _, backward = key.partition("+")
    variants = [training_variant(row.variant) for row in rows]
    return sum(v.precision == word and backward in ("", v.backward) for v in variants)


def _cell(values: list[float]) -> str:
    if not values:
        return "all alike"
    return f"{np.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """The command of the module's docstring."""
    parser = argparse.ArgumentParser(description="Spearman correlation of indicators")
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 4, 5, 6, 7])
    _print_table(parser.parse_args().seeds)


if __name__ == "__main__":
    with told():
        main()
