"""`Tuning`: what a few rows measured on a device change in the law of the operator predictor.

For each kind of operator of one device, library and data type the law of `operator_predictor` gets
free numbers, and each family trees g on what is left:

    latency = head(o e^h, max(bound, structural * exp(f + c + sum over e of t_e (f_e - m_e)
              + sum over j of b_j z_j + g)))

with h the host's speed, c an offset of the device, t_e what each expert counts more or less than
the gate says, and b_j slopes on shape features z_j, standardised and cut where they leave what
was seen. They are fitted in `tuned_experts`.

Shape legend: ``N`` rows, ``E`` experts, ``Z`` shape features, ``P`` = 2 + E + Z free numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.operators.operator_experts import Mixture
from foreplan.cost_models.operators.operator_features import Features
from foreplan.cost_models.tree_ensemble import TreeEnsemble
from foreplan.datasets.device import Device
from foreplan.datasets.sweeps.operator_table import Texts

Floats = NDArray[np.float64]

#: Features that may have a slope, where a family has them.
_SLOPED = (
    "log_roofline_us", "log_compute_to_memory", "log_bytes_to_l2", "log_m", "log_n", "log_k",
    "log_b", "log_rows", "log_cols", "wave_fill_128x128", "wave_fill_64x64", "log_waves_128x64",
    "align_m", "align_n", "align_k", "align_cols", "inputs", "cost", "log_queries", "log_keys",
    "log_group", "head_dim", "log_out", "window", "stride",
)  # fmt: skip


#: Standard deviations of the rows that were seen, from their mean, beyond which a slope says no
#: more: eight products of one height said what becomes of tall ones (chosen on eight GPUs of two
#: public tables; 1.5 is as good).
_FARTHEST = 2.0


class Corrected(NamedTuple):
    """The law of some rows after tuning.

    Attributes:
        overhead_s: launch overhead (N,).
        correction: of ln(structural time) (N,).
    """

    overhead_s: Floats
    correction: Floats


@dataclass(frozen=True, slots=True)
class Adjustment:
    """Free numbers of one kind of operator.

    Attributes:
        host: h.
        weights: c, the t_e and the b_j (P - 1,).
        centre, scale: of the shape features (Z,).
    """

    host: float
    weights: Floats
    centre: Floats
    scale: Floats

    def apply(self, law: Corrected, centred: Floats, shapes: Floats) -> Corrected:
        """The law of rows of the kind (N,); ``centred`` (N, E) as `centred`, ``shapes`` (N, Z)."""
        standard = np.clip((shapes - self.centre) / self.scale, -_FARTHEST, _FARTHEST)
        columns = np.column_stack([np.ones(len(shapes)), centred, standard])
        return Corrected(
            law.overhead_s * np.exp(self.host), law.correction + columns @ self.weights
        )


class Judged(NamedTuple):
    """Rows of one kind, and how far off predictions of them are: mean relative errors.

    Attributes:
        rows: their number.
        before: as the start predicts them.
        unseen: as a fit on other rows does; ``None`` for too few rows to tell.
    """

    rows: int
    before: float
    unseen: float | None


@dataclass(frozen=True, slots=True)
class Tuning:
    """What was learnt of one device, library and data type in one family.

    Attributes:
        family: one of `operator_features.FAMILIES`.
        device: figures of the device.
        library: as `OperatorTable.library`.
        dtype: as `OperatorTable.dtype`.
        judged: by kind, every kind that there were rows of.
        adjustments: by kind; a kind without one stays as it was.
        trees: on what they leave; ``None`` where the rows are too few, or trees no better.
        quantiles: 90 % quantile of abs(ln error), by kind, of rows that a fit did not see; kinds
            with too few rows have none.
    """

    family: str
    device: Device
    library: str
    dtype: str
    judged: Mapping[str, Judged] = field(default_factory=dict)
    adjustments: Mapping[str, Adjustment] = field(default_factory=dict)
    trees: TreeEnsemble | None = None
    quantiles: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Family, device, library and data type."""
        return self.family, self.device.name, self.library, self.dtype

    def apply(self, mixture: Mixture, kinds: Texts, block: Features) -> Corrected:
        """The law of rows that a mixture answers for.

        Args:
            mixture: of the experts that were tuned (N,).
            kinds: of its rows (N,).
            block: their features (N,).
        """
        found = Corrected(mixture.overhead_s.copy(), mixture.base.copy())
        apart, shapes = centred(mixture), shape_features(block)
        for kind, adjustment in self.adjustments.items():
            rows = np.flatnonzero(kinds == kind)
            if len(rows):
                before = Corrected(found.overhead_s[rows], found.correction[rows])
                after = adjustment.apply(before, apart[rows], shapes[rows])
                found.overhead_s[rows], found.correction[rows] = after
        if self.trees is not None:
            rows = np.flatnonzero(np.isin(kinds, list(self.adjustments)))
            given = tree_features(block, found.correction)
            found.correction[rows] += self.trees.predict(given[rows])
        return found

    def quantile(self, kinds: Texts) -> Floats:
        """`quantiles` of each row's kind (N,), NaN where there is none."""
        return np.array([self.quantiles.get(kind, np.nan) for kind in kinds], dtype=np.float64)


def centred(mixture: Mixture) -> Floats:
    """What each expert says of a row beside its mean (N, E)."""
    return np.asarray(mixture.corrections - mixture.offsets)


def shape_features(block: Features) -> Floats:
    """Features that may have a slope (N, Z), 0 where unknown."""
    names = [block.names.index(name) for name in _SLOPED if name in block.names]
    return np.nan_to_num(block.values[:, names].astype(np.float64))


def tree_features(block: Features, correction: Floats) -> NDArray[np.float32]:
    """What trees are given: the features and the correction so far (N, F + 1)."""
    return np.column_stack([block.values, correction]).astype(np.float32)
