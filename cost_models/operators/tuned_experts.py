"""`TunedExperts`: experts of library operators, fine-tuned by rows that were measured on a device.

The law is that of `operator_tuning`. Its free numbers have normal priors around 0, so one row moves
the offset a little and 64 rows can change what is believed of whom: the maximum a posteriori, with
a soft-L1 loss against outliers (scipy's ``least_squares``). The widths of the priors are assumed;
of 0.3, 0.2 and 0.15 for the offset the last was best on eight GPUs with 1, 8 and 64 rows a kind.
Trees are fitted on what is left where there are 64 rows. Five folds say, of rows that a fit did not
see, whether trees are worth it, and of each kind whether it is better as it was. The 90 % interval
is the conformal quantile of the rows' errors in those folds, by kind. Devices, libraries and data
types without rows are answered as before.

This is few-shot, never zero-shot: whoever shows its errors says how many rows it saw. Errors on
GPUs of which 8 and 64 rows a kind, and 5 % of all, are known: docs/results/operators.md.

Shape legend: ``N`` rows, ``E`` experts, ``Z`` shape features, ``P`` = 2 + E + Z free numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.evaluation import why_not
from foreplan.cost_models.operators.conformal import conformal_quantile
from foreplan.cost_models.operators.fitted_experts import FittedExperts, Timed, by_family
from foreplan.cost_models.operators.operator_experts import Mixture, seconds
from foreplan.cost_models.operators.operator_features import Features, features
from foreplan.cost_models.operators.operator_tuning import (
    Adjustment,
    Corrected,
    Judged,
    Tuning,
    centred,
    shape_features,
    tree_features,
)
from foreplan.cost_models.tree_ensemble import TreeEnsemble
from foreplan.datasets.device import Device
from foreplan.datasets.sweeps.operator_table import OperatorTable, Texts, texts
from foreplan.errors import SpecError

Floats = NDArray[np.float64]

#: Widths of the priors: host's speed, device's offset, an expert's share, a slope.
_HOST, _OFFSET, _EXPERT, _SLOPE = 0.3, 0.15, 0.15, 0.05

#: Spread of ln(measured / law) that is noise, by family; others 0.15.
_NOISE = MappingProxyType({"product": 0.2, "conv": 0.2, "wide": 0.1})

#: Folds that judge, and rows of a family from which they do, and from which trees are tried
#: (assumed). Trees: their number, depth and rate, chosen on five GPUs of NeuSight's table with 5 %
#: of their rows (60 to 300 trees of depth 3 to 6).
_FOLDS, _FEWEST_JUDGED, _FEWEST_FOR_TREES = 5, 20, 64
_TREES, _DEPTH, _RATE = 200, 6, 0.08

#: Rows of a kind that an interval of its own takes.
_FEWEST_FOR_QUANTILE = 10


class TunedExperts(FittedExperts):
    """Experts that have seen a few rows of some devices.

    Build it with `fit`.

    Args:
        experts: that were tuned, all of them.
        tunings: what was learnt.

    Attributes:
        tunings_: by family, device, library and data type.
    """

    def __init__(self, experts: FittedExperts, tunings: Sequence[Tuning]) -> None:
        super().__init__(experts.experts_, experts.quantiles_, experts.gate)
        self.tunings_ = {tuning.key: tuning for tuning in tunings}

    @classmethod
    def fit(cls, experts: FittedExperts, table: OperatorTable, *, seed: int = 0) -> Self:
        """Learn from measured rows of one or several devices; devices do not share anything.

        Args:
            experts: fitted without the devices, or with them.
            table: the rows; those of unknown operators, data types or devices teach nothing.
            seed: of the folds and the trees.

        Raises:
            SpecError: no row that the experts can predict.
        """
        found = []
        named = _by_their_name(table)
        for family, rows in by_family(named):
            part = named.take(rows)
            block = features(part, family)
            for mixture in experts.mixtures(family, part, block):
                device = part.device_of(part.device[mixture.rows[0]])
                mine = _Rows.of(part.take(mixture.rows), mixture, block.take(mixture.rows))
                if device is not None and len(mine):
                    found.append(_tuned(family, device, mine, seed))
        if not found:
            raise SpecError(
                "rows to tune with", got=len(table), expected="rows that the predictor knows the "
                "operator, data type and device of", fix=why_not(table, 0) if len(table) else None,
            )  # fmt: skip
        return cls(experts, found)

    def without(self, chips: Collection[str]) -> FittedExperts:
        """The experts as trained without any row of these chips, not tuned."""
        return FittedExperts(self.experts_, self.quantiles_, self.gate).without(chips)

    def timed(self) -> Iterator[Timed]:
        """As `FittedExperts.timed`, with what the tunings saw."""
        yield from super().timed()
        for t in self.tunings_.values():
            yield Timed(t.device, t.library, t.family, t.dtype, tuple(t.judged))

    def answer(
        self, family: str, mixture: Mixture, table: OperatorTable, block: Features
    ) -> tuple[Floats, Floats]:
        """As `FittedExperts.answer`, by what was learnt of the rows' device."""
        device = table.device_of(table.device[0])
        name = "" if device is None else device.name
        tuning = self.tunings_.get((family, name, table.library[0], table.dtype[0]))
        before_s, seen = super().answer(family, mixture, table, block)
        if tuning is None:
            return before_s, seen
        law = tuning.apply(mixture, table.kind, block)
        found = seconds(law.overhead_s, block.structural_s, block.bound_s, law.correction)
        learnt = np.isin(table.kind, list(tuning.adjustments))
        return np.where(learnt, found, before_s), np.where(
            learnt, tuning.quantile(table.kind), seen
        )


def _by_their_name(table: OperatorTable) -> OperatorTable:
    """A table in which no device of the zoo has two names, so that its rows teach together."""
    known = {name: table.device_of(name) for name in set(table.device)}
    own = {
        name: name if device is None or name in table.devices else device.name
        for name, device in known.items()
    }
    return replace(table, device=texts(own[name] for name in table.device))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one device, library and data type in one family, with what experts say of them."""

    table: OperatorTable
    mixture: Mixture
    block: Features

    @classmethod
    def of(cls, table: OperatorTable, mixture: Mixture, block: Features) -> _Rows:
        """The rows that something can be learnt from."""
        measured = table.latency_s
        known = np.isfinite(mixture.base) & np.isfinite(block.structural_s) & (measured > 0)
        return cls(table, mixture, block).take(np.flatnonzero(known))

    def take(self, rows: NDArray[np.int64]) -> _Rows:
        m = self.mixture
        chosen = replace(
            m, rows=m.rows[rows], corrections=m.corrections[rows], offsets=m.offsets[rows],
            base=m.base[rows], overhead_s=m.overhead_s[rows],
        )  # fmt: skip
        return _Rows(self.table.take(rows), chosen, self.block.take(rows))

    def __len__(self) -> int:
        return len(self.table)

    @property
    def kinds(self) -> Texts:
        return self.table.kind

    def seconds(self, law: Corrected) -> Floats:
        block = self.block
        return seconds(law.overhead_s, block.structural_s, block.bound_s, law.correction)

    def ratio(self, tuning: Tuning) -> Floats:
        """Predicted over measured (N,)."""
        law = tuning.apply(self.mixture, self.kinds, self.block)
        return self.seconds(law) / self.table.latency_s


def _tuned(family: str, device: Device, mine: _Rows, seed: int) -> Tuning:
    """Fit on all rows what folds of them say is worth it."""
    table = mine.table
    plain = Tuning(family, device, table.library[0], table.dtype[0])
    start = mine.ratio(plain)
    kinds = {str(kind): np.flatnonzero(mine.kinds == kind) for kind in sorted(set(mine.kinds))}
    if len(mine) < _FEWEST_JUDGED:
        judged = {k: Judged(len(rows), _off(start[rows]), None) for k, rows in kinds.items()}
        return replace(_fitted(plain, mine, seed, trees=False), judged=judged)
    few = len(mine) < _FEWEST_FOR_TREES
    tried = {
        trees: _unseen(plain, mine, seed, trees) for trees in ((False,) if few else (False, True))
    }
    chosen = min(tried, key=lambda trees: _spread(tried[trees]))
    unseen = tried[chosen]
    better = {k: rows for k, rows in kinds.items() if _spread(unseen[rows]) < _spread(start[rows])}
    found = _fitted(plain, mine, seed, trees=chosen)
    after = {kind: (unseen if kind in better else start)[rows] for kind, rows in kinds.items()}
    return replace(
        found,
        adjustments={kind: found.adjustments[kind] for kind in better},
        judged={
            kind: Judged(len(rows), _off(start[rows]), _off(after[kind]))
            for kind, rows in kinds.items()
        },
        quantiles={
            kind: conformal_quantile(np.abs(np.log(unseen[rows])))
            for kind, rows in better.items() if len(rows) >= _FEWEST_FOR_QUANTILE
        },
    )  # fmt: skip


def _unseen(plain: Tuning, mine: _Rows, seed: int, trees: bool) -> Floats:
    """Predicted over measured of each row, by a fit on the other folds (N,)."""
    fold = np.random.default_rng(seed).permutation(len(mine)) % _FOLDS
    found = np.empty(len(mine))
    for number in range(_FOLDS):
        rest, out = (np.flatnonzero(c) for c in (fold != number, fold == number))
        found[out] = mine.take(out).ratio(_fitted(plain, mine.take(rest), seed, trees=trees))
    return found


def _off(ratio: Floats) -> float:
    return float(np.abs(ratio - 1).mean())


def _spread(ratio: Floats) -> float:
    return float(np.abs(np.log(ratio)).mean())


def _fitted(plain: Tuning, mine: _Rows, seed: int, *, trees: bool) -> Tuning:
    kinds = sorted(set(mine.kinds))
    found = replace(
        plain,
        adjustments={
            str(kind): _adjusted(plain.family, mine.take(np.flatnonzero(mine.kinds == kind)))
            for kind in kinds
        },
    )
    if not trees:
        return found
    law = found.apply(mine.mixture, mine.kinds, mine.block)
    grown = TreeEnsemble.fit(
        tree_features(mine.block, law.correction), overhead_s=law.overhead_s,
        structural_s=mine.block.structural_s * np.exp(law.correction),
        latency_s=mine.table.latency_s, trees=_TREES, depth=_DEPTH, rate=_RATE, seed=seed,
    )  # fmt: skip
    return replace(found, trees=grown)


def _adjusted(family: str, mine: _Rows) -> Adjustment:
    """The maximum a posteriori of the free numbers of one kind."""
    from scipy.optimize import least_squares  # type: ignore[import-untyped, unused-ignore]

    count, target = len(mine), np.log(mine.table.latency_s)
    apart, shapes = centred(mine.mixture), shape_features(mine.block)
    centre, scale = shapes.mean(axis=0), np.maximum(shapes.std(axis=0), 1e-9)
    if count < 2:  # no spread to standardise by, and no slope to learn
        scale = np.full_like(scale, np.inf)
    width = np.concatenate(
        [[_OFFSET], np.full(apart.shape[1], _EXPERT), np.full(shapes.shape[1], _SLOPE)]
    )
    noise = _NOISE.get(family, 0.15)
    start = Corrected(mine.mixture.overhead_s, mine.mixture.base)

    def adjustment(free: Floats) -> Adjustment:
        return Adjustment(float(free[0] * _HOST), free[1:] * width, centre, scale)

    def residuals(free: Floats) -> Floats:
        said = mine.seconds(adjustment(free).apply(start, apart, shapes))
        return np.concatenate([(np.log(said) - target) / noise, free])

    def loss(square: Floats) -> Floats:
        # Soft L1 for rows, plain squares for priors.
        root = np.where(np.arange(len(square)) < count, np.sqrt(1 + square), 1.0)
        row = np.arange(len(square)) < count
        return np.stack([
            np.where(row, 2 * (root - 1), square),
            np.where(row, 1 / root, 1.0),
            np.where(row, -0.5 / root**3, 0.0),
        ])  # fmt: skip

    return adjustment(least_squares(residuals, np.zeros(1 + len(width)), loss=loss, max_nfev=60).x)
