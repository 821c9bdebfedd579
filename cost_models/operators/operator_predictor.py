"""The predictor of library operators: chip experts on a physical structure, mixed by likeness.

For a row of family g on device d,

    latency = head(o, max(bound, structural * exp(f)))             (launch_head)
    f       = b * sum over experts e of w_e (f_e(features) - m_e) + anchor
                                                                 (device_gate, tree_ensemble)

An expert is one (device, library, data type) of the training data; its trees see dimensionless
features only (operator_features). Where the data name the kernels, an expert of matrix products
also foretells which tile the library takes (tile_selector), and ``structural`` is that tile's time.
A device that was trained on is answered by its own expert, any other by the experts of like chips.
m_e is the expert's mean correction: a chip's peculiarity as a whole (a board that throttles) is not
handed on with the shape of its correction, instead the anchor is the weighted median of the m_e.
Device time is never below the bound (arithmetic at peak, bytes that no cache can have kept), so
efficiency stays in (0, 1] for every chip and shape.

Experts are independent of each other. So leaving a chip out of the mixture (``without``) *is* the
model trained without the chip, and leave-one-chip-out needs no second training.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import (  # type: ignore[import-untyped, unused-ignore]
    BaseEstimator,
    RegressorMixin,
)
from sklearn.utils.validation import (  # type: ignore[import-untyped, unused-ignore]
    check_is_fitted,
)

from foreplan.cost_models.operators.conformal import conformal_quantile, unseen_quantiles
from foreplan.cost_models.operators.device_gate import GateScales
from foreplan.cost_models.operators.fitted_experts import FittedExperts, by_family
from foreplan.cost_models.operators.operator_experts import (
    Expert,
    overheads,
    same_arithmetic,
    seconds,
)
from foreplan.cost_models.operators.operator_features import features
from foreplan.cost_models.operators.tile_selector import fit_selector, kernel_tiles
from foreplan.cost_models.tree_ensemble import TreeEnsemble
from foreplan.datasets.device import Device
from foreplan.datasets.sweeps.operator_cases import RECORDED
from foreplan.datasets.sweeps.operator_table import OperatorTable
from foreplan.errors import SpecError

Floats = NDArray[np.float64]

#: Trees of an expert of operators timed in sweeps inside CUDA graphs: how many for one of
#: `OperatorPredictor`'s, how much deeper, and their rate for one of its. Chosen on folds
#: (docs/results/operators_history.md).
_SWEEP_TREES, _SWEEP_DEEPER, _SWEEP_RATE = 1.5, 2, 0.7

#: Rows that an expert needs (assumed).
_FEWEST_ROWS = 30


class OperatorPredictor(RegressorMixin, BaseEstimator, FittedExperts):  # type: ignore[misc, unused-ignore]
    """Fits experts of library operators; predicts by them as `FittedExperts`.

    Args:
        trees: trees of an expert; of a sweep inside CUDA graphs half as many again.
        depth: depth of a tree; of such a sweep's two more.
        rate: learning rate; of such a sweep's 0.7 of it.
        gate: scales of the gate; ``None`` for the fitted ones.
        seed: of every random choice.

    Attributes:
        experts_: the fitted `Expert` records.
        quantiles_: kind to the 90 % quantile of abs(ln error) on chips held out in turn.
    """

    def __init__(
        self,
        *,
        trees: int = 200,
        depth: int = 6,
        rate: float = 0.1,
        gate: GateScales | None = None,
        seed: int = 0,
    ) -> None:
        self.trees = trees
        self.depth = depth
        self.rate = rate
        self.gate = gate
        self.seed = seed

    def fit(self, table: OperatorTable, y: Floats | None = None) -> Self:
        """Fit an expert for each device, library and data type of the table.

        Args:
            table: measured rows; rows of unknown kind, data type or device teach nothing.
            y: seconds (N,), if not ``table.latency_s``.

        Raises:
            SpecError: no row to learn from, or not a label for each row.
        """
        latency = table.latency_s if y is None else np.asarray(y, dtype=np.float64)
        if latency.shape != (len(table),):
            raise SpecError(
                "training data", got=f"labels of shape {latency.shape}", expected=f"({len(table)},)"
            )
        self.experts_, self.quantiles_ = [], {}
        for family, rows in by_family(table):
            part = table.take(rows)
            label = latency[rows]
            for chosen in _by_expert(part):  # the expert's own rows first
                device = part.device_of(part.device[chosen[0]])
                if device is not None:
                    expert = self._fit_expert(family, device, part.take(chosen), label[chosen])
                    if expert is not None:
                        self.experts_.append(expert)
        if not self.experts_:
            raise SpecError(
                "training data", got=f"no usable row of {len(table)}",
                expected=f"at least {_FEWEST_ROWS} of a family of known operators, data type and "
                "library, on a device with known figures",
            )  # fmt: skip
        self.quantiles_ = unseen_quantiles(self, table, latency)
        return self

    def predict_parts(self, table: OperatorTable) -> tuple[Floats, Floats]:
        """As `FittedExperts.predict_parts`.

        Raises:
            sklearn.exceptions.NotFittedError: before `fit`.
        """
        check_is_fitted(self)
        return super().predict_parts(table)

    def without(self, chips: Collection[str]) -> OperatorPredictor:
        """The model as trained without any row of these chips."""
        other = OperatorPredictor(**self.get_params(deep=False))
        other.experts_ = [e for e in self.experts_ if e.device.chip not in chips]
        other.quantiles_ = self.quantiles_
        return other

    def save(self, folder: str | Path, **facts: Any) -> dict[str, object]:
        """Write weights and card to a folder; returns the card. See `operator_weights.save`."""
        from foreplan.cost_models.operators.operator_weights import save

        return save(self, Path(folder), facts)

    @classmethod
    def load(cls, folder: str | Path) -> OperatorPredictor:
        """Read what `save` wrote. See `operator_weights.load`."""
        from foreplan.cost_models.operators.operator_weights import load

        return load(Path(folder))

    def _fit_expert(
        self, family: str, device: Device, part: OperatorTable, measured: Floats
    ) -> Expert | None:
        block, tiles = features(part, family), None
        if family == "product":
            ran = kernel_tiles(part.kernel)
            tiles = fit_selector(block.values, ran)
            block = block if tiles is None else features(part, family, ran)
        usable = np.isfinite(block.structural_s) & (measured > 0)
        if usable.sum() < _FEWEST_ROWS:
            return None
        overhead = overheads(part, measured, block.roofline_s)
        given = np.array([overhead.get(name, 0.0) for name in part.op])
        rng = np.random.default_rng(self.seed)
        kept_out = usable & (rng.random(len(part)) < 0.1)
        deep = part.library[0].startswith(RECORDED)
        count = round(self.trees * _SWEEP_TREES) if deep else self.trees
        depth = self.depth + _SWEEP_DEEPER if deep else self.depth
        rate = self.rate * _SWEEP_RATE if deep else self.rate

        taught = usable & ~kept_out
        ensemble = TreeEnsemble.fit(
            block.values[taught], overhead_s=given[taught],
            structural_s=block.structural_s[taught], latency_s=measured[taught], trees=count,
            depth=depth, rate=rate, seed=self.seed,
        )  # fmt: skip
        correction = ensemble.predict(block.values)
        found = seconds(given, block.structural_s, block.bound_s, correction)
        errors = np.abs(np.log(found[kept_out] / measured[kept_out]))
        offsets = {
            str(kind): float(correction[usable & (part.kind == kind)].mean())
            for kind in sorted(set(part.kind[usable]))
        }
        return Expert(
            family=family, device=device, library=part.library[0], dtype=part.dtype[0],
            trees=ensemble, rows=int(usable.sum()), overhead_s=overhead,
            seen_quantile=conformal_quantile(errors), offsets=offsets, tiles=tiles,
        )  # fmt: skip


def _by_expert(table: OperatorTable) -> list[NDArray[np.int64]]:
    """Rows of each device (whatever a source calls it), library and data type.

    Behind them stand the rows of data types that move as many bytes through units of the same kind:
    BF16 and FP16 teach each other. In five folds of 3,064 operators inside CUDA graphs 16-bit ones
    are 24.8 % off so, and 29.3 % apart (docs/results/operators_history.md).
    """
    found = {name: table.device_of(name) for name in set(table.device)}
    name_of = {name: name if device is None else device.name for name, device in found.items()}
    groups: dict[tuple[str, str, str], list[int]] = {}
    for row, (name, *rest) in enumerate(zip(table.device, table.library, table.dtype, strict=True)):
        groups.setdefault((name_of[name], *rest), []).append(row)
    together = []
    for key in sorted(groups):
        *place, dtype = key
        alike = [
            row for (*other, known), rows in groups.items() for row in rows
            if other == place and known != dtype and same_arithmetic(known, dtype)
        ]  # fmt: skip
        together.append(np.array(groups[key] + alike))
    return together
