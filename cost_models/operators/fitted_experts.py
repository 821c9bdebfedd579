"""`FittedExperts`: what fitted experts of library operators answer together.

Apart from `OperatorPredictor`, which fits them: scikit-learn, whose estimator that one is, takes as
long to load as everything else of a prediction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.operators.device_gate import GateScales
from foreplan.cost_models.operators.operator_experts import Expert, Mixture, mix, seconds
from foreplan.cost_models.operators.operator_features import FAMILIES, Features, features
from foreplan.datasets.device import Device
from foreplan.datasets.sweeps.operator_table import OperatorTable

Floats = NDArray[np.float64]


class Timed(NamedTuple):
    """What rows of one source were of.

    Attributes:
        device: that they ran on.
        library: as `OperatorTable.library`.
        family: of the operators.
        dtype: as `OperatorTable.dtype`.
        kinds: of operators.
    """

    device: Device
    library: str
    family: str
    dtype: str
    kinds: tuple[str, ...]


class FittedExperts:
    """Predicts the latency of library operators on devices seen and unseen.

    Args:
        experts: fitted `Expert` records.
        quantiles: kind to the 90 % quantile of abs(ln error) on chips held out in turn.
        gate: scales of the gate; ``None`` for the fitted ones.

    Attributes:
        experts_: likewise.
        quantiles_: likewise.
    """

    def __init__(
        self,
        experts: Sequence[Expert],
        quantiles: Mapping[str, float],
        gate: GateScales | None = None,
    ) -> None:
        self.experts_, self.quantiles_, self.gate = list(experts), dict(quantiles), gate

    def predict(self, table: OperatorTable) -> Floats:
        """Seconds (N,), NaN where the operator, data type or device's figures are unknown."""
        return self.predict_parts(table)[0]

    def predict_interval(self, table: OperatorTable) -> tuple[Floats, Floats, Floats]:
        """Mean, low and high end of the nominal 90 % interval, seconds (N,) each."""
        mean, seen = self.predict_parts(table)
        unseen = np.array([self.quantiles_.get(kind, 0.7) for kind in table.kind])
        width = np.where(np.isnan(seen), unseen, seen)
        return mean, mean * np.exp(-width), mean * np.exp(width)

    def without(self, chips: Collection[str]) -> FittedExperts:
        """The model as trained without any row of these chips."""
        kept = [e for e in self.experts_ if e.device.chip not in chips]
        return FittedExperts(kept, self.quantiles_, self.gate)

    def predict_parts(self, table: OperatorTable) -> tuple[Floats, Floats]:
        """Seconds (N,), and the seen quantile of rows whose very device was trained on (N,)."""
        found, seen = np.full(len(table), np.nan), np.full(len(table), np.nan)
        for family, rows in by_family(table):
            part = table.take(rows)
            block = features(part, family)
            for mixture in self.mixtures(family, part, block):
                at = mixture.rows
                found[rows[at]], seen[rows[at]] = self.answer(
                    family, mixture, part.take(at), block.take(at)
                )
        return found, seen

    def answer(
        self, family: str, mixture: Mixture, table: OperatorTable, block: Features
    ) -> tuple[Floats, Floats]:
        """What `predict_parts` says of one device, library and data type.

        Args:
            family: of the rows.
            mixture: what the experts say of them (N,).
            table: the rows (N,).
            block: their features (N,).
        """
        mean = seconds(mixture.overhead_s, block.structural_s, block.bound_s, mixture.base)
        return mean, np.full(len(table), mixture.seen_quantile)

    def timed(self) -> Iterator[Timed]:
        """What rows taught it, expert by expert."""
        for e in self.experts_:
            yield Timed(e.device, e.library, e.family, e.dtype, tuple(e.offsets))

    def mixtures(self, family: str, table: OperatorTable, block: Features) -> list[Mixture]:
        """Answers of the experts for a table of one family, group by group.

        Rows of devices without figures are in no group.
        """
        pool = [expert for expert in self.experts_ if expert.family == family]
        scales = self.gate or GateScales()
        groups: dict[tuple[str, str, str], list[int]] = {}
        for row, key in enumerate(zip(table.device, table.library, table.dtype, strict=True)):
            groups.setdefault(key, []).append(row)
        found = []
        for (name, _, _), members in groups.items():
            device = table.device_of(name)
            if device is not None and pool:
                rows = np.array(members)
                made = mix(pool, table.take(rows), block.take(rows), device, scales)
                found.append(replace(made, rows=rows))
        return found


def by_family(table: OperatorTable) -> list[tuple[str, NDArray[np.int64]]]:
    """Families that a table has rows of, with the rows' indices."""
    found = [(name, np.flatnonzero(np.isin(table.kind, kinds))) for name, kinds in FAMILIES.items()]
    return [(name, rows) for name, rows in found if len(rows)]
