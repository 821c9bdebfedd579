"""The predictor of library operators: chip experts on a physical structure, mixed by likeness.

For a row of family g on device d,

    latency = head(o, max(bound, structural * exp(f)))             (launch_head)
    f       = sum over experts e of w_e f_e(features) / sum of w_e     (device_gate, tree_ensemble)

An expert is one (device, library, data type) of the training data; its trees see dimensionless
features only (operator_features). A device that was trained on is answered by its own expert, any
other by the experts of like chips. Device time is never below the bound (arithmetic at peak, bytes
that no cache can have kept), so efficiency stays in (0, 1] for every chip and shape.

Experts are independent of each other. So leaving a chip out of the mixture (``without``) *is* the
model trained without the chip, and leave-one-chip-out needs no second training.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import (  # type: ignore[import-untyped, unused-ignore]
    BaseEstimator,
    RegressorMixin,
)

from foreplan.cost_models.device_gate import GateScales, distance, library_distance
from foreplan.cost_models.launch_head import head
from foreplan.cost_models.operator_features import FAMILIES, features
from foreplan.cost_models.operator_work import PRECISIONS
from foreplan.cost_models.tree_ensemble import TreeEnsemble
from foreplan.datasets.device import Device
from foreplan.datasets.operator_table import OperatorTable
from foreplan.errors import SpecError

Floats = NDArray[np.float64]

#: Share of the experts' correction that is believed on a device none of them has seen; the rest
#: falls back to the structure. Fitted on leave-one-chip-out folds, one a family.
_BELIEF = MappingProxyType({"product": 0.8, "wide": 0.85})

#: Rows of an expert that only measure the host, at most this much roofline time.
_LAUNCH_BOUND_S = 2e-6


@dataclass(frozen=True, slots=True)
class Expert:
    """Trees of one device, library and data type in one family.

    Attributes:
        family: one of `operator_features.FAMILIES`.
        device: figures of the device.
        library: as `OperatorTable.library`.
        dtype: as `OperatorTable.dtype`.
        trees: the correction.
        rows: rows it was fitted on.
        overhead_s: launch overhead by operator name; empty for libraries timed in CUDA graphs.
        seen_quantile: 90 % quantile of abs(ln error) on rows of the expert kept out of its fit.
    """

    family: str
    device: Device
    library: str
    dtype: str
    trees: TreeEnsemble
    rows: int
    overhead_s: dict[str, float] = field(default_factory=dict)
    seen_quantile: float = 0.3

    @property
    def key(self) -> str:
        """Name of the expert in a weight file."""
        return f"{self.family}|{self.device.name}|{self.library}|{self.dtype}"


class OperatorPredictor(RegressorMixin, BaseEstimator):  # type: ignore[misc, unused-ignore]
    """Predicts the latency of library operators on devices seen and unseen.

    Args:
        trees: trees of an expert.
        depth: depth of a tree.
        rate: learning rate.
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
            SpecError: no row to learn from.
        """
        latency = table.latency_s if y is None else y
        self.experts_: list[Expert] = []
        self.quantiles_: dict[str, float] = {}
        for family, rows in _by_family(table):
            part = table.take(rows)
            label = latency[rows]
            for chosen in _by_expert(part):
                device = part.device_of(part.device[chosen[0]])
                if device is not None:
                    expert = self._fit_expert(family, device, part.take(chosen), label[chosen])
                    if expert is not None:
                        self.experts_.append(expert)
        if not self.experts_:
            raise SpecError("training data", got="no usable row", expected="known operators on "
                            "devices with known figures")  # fmt: skip
        from foreplan.cost_models.conformal import unseen_quantiles

        self.quantiles_ = unseen_quantiles(self, table, latency)
        return self

    def predict(self, table: OperatorTable) -> Floats:
        """Seconds (N,), NaN where the operator, data type or device's figures are unknown."""
        return self.predict_parts(table)[0]

    def predict_interval(self, table: OperatorTable) -> tuple[Floats, Floats, Floats]:
        """Mean, low and high end of the nominal 90 % interval, seconds (N,) each."""
        mean, seen = self.predict_parts(table)
        unseen = np.array([self.quantiles_.get(kind, 0.7) for kind in table.kind])
        width = np.where(np.isnan(seen), unseen, seen)
        return mean, mean * np.exp(-width), mean * np.exp(width)

    def without(self, chips: Collection[str]) -> OperatorPredictor:
        """The model as trained without any row of these chips."""
        other = OperatorPredictor(**self.get_params(deep=False))
        other.experts_ = [e for e in self.experts_ if e.device.chip not in chips]
        other.quantiles_ = self.quantiles_
        return other

    def predict_parts(self, table: OperatorTable) -> tuple[Floats, Floats]:
        """Seconds (N,), and the seen quantile of rows whose very device was trained on (N,)."""
        seconds, seen = np.full(len(table), np.nan), np.full(len(table), np.nan)
        for family, rows in _by_family(table):
            pool = [expert for expert in self.experts_ if expert.family == family]
            if pool:
                seconds[rows], seen[rows] = self._mix(family, table.take(rows), pool)
        return seconds, seen

    def save(self, folder: str | Path, **facts: Any) -> dict[str, object]:
        """Write weights and card to a folder; returns the card. See `operator_weights.save`."""
        from foreplan.cost_models.operator_weights import save

        return save(self, Path(folder), facts)

    @classmethod
    def load(cls, folder: str | Path) -> OperatorPredictor:
        """Read what `save` wrote. See `operator_weights.load`."""
        from foreplan.cost_models.operator_weights import load

        return load(Path(folder))

    def _fit_expert(
        self, family: str, device: Device, part: OperatorTable, latency: Floats
    ) -> Expert | None:
        block = features(part, family)
        usable = np.isfinite(block.structural_s) & (latency > 0)
        if usable.sum() < 30:
            return None
        overhead = _overheads(part, latency, block.roofline_s)
        given = np.array([overhead.get(name, 0.0) for name in part.op])
        rng = np.random.default_rng(self.seed)
        kept_out = usable & (rng.random(len(part)) < 0.1)

        def fitted(rows: NDArray[np.bool_], trees: int) -> TreeEnsemble:
            return TreeEnsemble.fit(
                block.values[rows], overhead_s=given[rows], structural_s=block.structural_s[rows],
                latency_s=latency[rows], trees=trees, depth=self.depth, rate=self.rate,
                seed=self.seed,
            )  # fmt: skip

        ensemble = fitted(usable & ~kept_out, self.trees)
        correction = ensemble.predict(block.values)
        found = _time(given, block.structural_s, block.bound_s, correction)
        errors = np.abs(np.log(found[kept_out] / latency[kept_out]))
        return Expert(
            family=family, device=device, library=part.library[0], dtype=part.dtype[0],
            trees=ensemble, rows=int(usable.sum()), overhead_s=overhead,
            seen_quantile=_quantile(errors),
        )  # fmt: skip

    def _mix(
        self, family: str, table: OperatorTable, pool: list[Expert]
    ) -> tuple[Floats, Floats]:
        block = features(table, family)
        correction, overhead = np.zeros(len(table)), np.zeros(len(table))
        seen = np.full(len(table), np.nan)
        groups: dict[tuple[str, str, str], list[int]] = {}
        for row, key in enumerate(zip(table.device, table.library, table.dtype, strict=True)):
            groups.setdefault(key, []).append(row)
        for (name, library, dtype), members in groups.items():
            rows = np.array(members)
            device = table.device_of(name)
            if device is None:
                continue
            weights = self._weights(device, library, dtype, pool)
            if not weights:
                correction[rows] = np.nan
                continue
            total = sum(weight for _, weight in weights)
            stranger = all(expert.device.chip != device.chip for expert, _ in weights)
            belief = _BELIEF.get(family, 1.0) if stranger else 1.0
            for expert, weight in weights:
                own = expert.trees.predict(block.values[rows])
                correction[rows] += belief * weight / total * own
                if weight >= 1.0:
                    seen[rows] = expert.seen_quantile
            overhead[rows] = _launch(table.op[rows], device, library, dtype, pool)
        seconds = _time(overhead, block.structural_s, block.bound_s, correction)
        return seconds, seen

    def _weights(
        self, device: Device, library: str, dtype: str, pool: list[Expert]
    ) -> list[tuple[Expert, float]]:
        """Experts that answer for a device, with weights; the very device's own answers alone."""
        scales = self.gate or GateScales()
        if dtype not in PRECISIONS:
            return []
        found = []
        for expert in pool:
            away = distance(device, expert.device, scales)
            same = device.chip == expert.device.chip
            away += library_distance(library, expert.library, dtype, scales, same_chip=same)
            if expert.dtype != dtype:
                away += scales.dtype * _dtype_distance(expert.dtype, dtype, expert.family)
            found.append((expert, float(np.exp(-away))))
        own = [pair for pair in found if pair[1] >= 1.0]
        # Boards of one chip run the same kernels of the same library at other clocks and memory.
        chip = [
            pair for pair in found if pair[0].device.chip == device.chip
            and pair[0].dtype == dtype and pair[0].library == library
        ]  # fmt: skip
        best = max((weight for _, weight in found), default=0.0)
        return own or chip or [pair for pair in found if pair[1] >= 0.02 * best]


def _by_family(table: OperatorTable) -> list[tuple[str, NDArray[np.int64]]]:
    found = [(name, np.flatnonzero(np.isin(table.kind, kinds))) for name, kinds in FAMILIES.items()]
    return [(name, rows) for name, rows in found if len(rows)]


def _by_expert(table: OperatorTable) -> list[NDArray[np.int64]]:
    """Rows of each device (whatever a source calls it), library and data type."""
    found = {name: table.device_of(name) for name in set(table.device)}
    name_of = {name: name if device is None else device.name for name, device in found.items()}
    groups: dict[tuple[str, str, str], list[int]] = {}
    for row, (name, *rest) in enumerate(
        zip(table.device, table.library, table.dtype, strict=True)
    ):
        groups.setdefault((name_of[name], *rest), []).append(row)
    return [np.array(groups[key]) for key in sorted(groups)]


def _same_arithmetic(one: str, two: str) -> bool:
    """Whether two data types move the same bytes through the same kind of unit."""
    if one == two:
        return True
    a, b = PRECISIONS.get(one), PRECISIONS.get(two)
    half = ("bf16", "fp16")
    return (
        a is not None
        and b is not None
        and (a.activation_bytes, a.weight_bytes) == (b.activation_bytes, b.weight_bytes)
        and (a.compute[0] == b.compute[0] or (a.compute[0] in half and b.compute[0] in half))
        and not {one, two} & {"fp8_block", "sq"}
    )


def _dtype_distance(one: str, two: str, family: str) -> float:
    """0.1 for types of the same bytes and arithmetic, else more; most for another width."""
    if _same_arithmetic(one, two):
        return 0.1
    a, b = PRECISIONS[one].activation_bytes, PRECISIONS[two].activation_bytes
    # Attention kernels of one library are alike for every cache type, GEMM kernels are not.
    base = 3.0 if family == "product" else 0.7
    return base + 3.0 * (max(a, b) > 2.0 >= min(a, b))


def _overheads(part: OperatorTable, latency: Floats, roofline_s: Floats) -> dict[str, float]:
    """Launch overhead by operator: the median of rows with next to no work.

    Only torch's eager calls have one; the other libraries are timed inside CUDA graphs.
    """
    if not part.library[0].startswith("torch"):
        return {}
    found = {}
    for name in sorted(set(part.op)):
        rows = part.op == name
        small = rows & (roofline_s < _LAUNCH_BOUND_S)
        floor = np.median(latency[small]) if small.sum() > 20 else np.quantile(latency[rows], 0.1)
        found[str(name)] = float(min(floor, np.quantile(latency[rows], 0.3)))
    return found


def _launch(
    ops: NDArray[np.object_], device: Device, library: str, dtype: str, pool: list[Expert]
) -> Floats:
    """Launch overhead of each row: of the very device, else a low middle of the library's.

    It is a property of the host and the framework, not of the chip, so likeness plays no part.
    """
    if not library.startswith("torch"):
        return np.zeros(len(ops))
    tiers = (
        [e for e in pool if e.device.name == device.name and e.library == library],
        [e for e in pool if e.library == library],
        [e for e in pool if e.overhead_s],
    )
    by_op = {}
    for op in set(ops):
        for tier in tiers:
            values = [e.overhead_s[op] for e in tier if op in e.overhead_s]
            if values:
                break
        else:
            values = [v for e in pool for v in e.overhead_s.values()] or [0.0]
        # A busy host only ever adds, so the lower of the middle values.
        by_op[op] = float(np.quantile(values, 0.4, method="lower"))
    return np.array([by_op[op] for op in ops])


def _time(overhead: Floats, structural: Floats, bound: Floats, correction: Floats) -> Floats:
    with np.errstate(invalid="ignore"):
        device_s = np.maximum(structural * np.exp(np.clip(correction, -8, 12)), bound)
        return head(overhead, device_s)


def _quantile(errors: Floats) -> float:
    """The conformal 90 % quantile: rank ceil(0.9 (n + 1)) of n scores."""
    if len(errors) < 10:
        return float(errors.max(initial=0.5))
    rank = min(int(np.ceil(0.9 * (len(errors) + 1))), len(errors))
    return float(np.sort(errors)[rank - 1])
