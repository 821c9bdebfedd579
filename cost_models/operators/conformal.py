"""Widths of intervals: conformal over rows kept out of a fit, or over chips held out in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foreplan.datasets.sweeps.operator_table import UNKNOWN, OperatorTable

if TYPE_CHECKING:
    from foreplan.cost_models.operators.operator_predictor import OperatorPredictor

Floats = NDArray[np.float64]

#: Rows of a chip and kind that are scored; a quantile needs no more.
_ROWS = 4000


def unseen_quantiles(
    model: OperatorPredictor, table: OperatorTable, latency_s: Floats
) -> dict[str, float]:
    """90 % quantile of abs(ln(predicted / measured)) by kind, each chip held out in turn.

    Every chip counts the same however many rows it has: the quantile is over rows that are weighted
    by one over their chip's count. A chip with no like chip left is predicted by nobody and left
    out.

    Args:
        model: fitted experts.
        table: the training rows.
        latency_s: their labels (N,).
    """
    scores: dict[str, list[Floats]] = {}
    chips = table.chips
    rng = np.random.default_rng(0)
    for chip in sorted(set(chips)):
        rows = np.flatnonzero((chips == chip) & (table.kind != UNKNOWN))
        chosen = [
            rng.permutation(rows[table.kind[rows] == kind])[:_ROWS]
            for kind in sorted(set(table.kind[rows]))
        ]
        if not chosen:
            continue
        picked = np.concatenate(chosen)
        part = table.take(picked)
        predicted, _ = model.without({chip}).predict_parts(part)
        error = np.abs(np.log(predicted / latency_s[picked]))
        for kind in set(part.kind):
            known = error[(part.kind == kind) & np.isfinite(error)]
            if len(known):
                scores.setdefault(str(kind), []).append(known)
    return {kind: _weighted_quantile(parts) for kind, parts in sorted(scores.items())}


def conformal_quantile(errors: Floats) -> float:
    """The conformal 90 % quantile: rank ceil(0.9 (n + 1)) of n scores."""
    if len(errors) < 10:
        return float(errors.max(initial=0.5))
    rank = min(int(np.ceil(0.9 * (len(errors) + 1))), len(errors))
    return float(np.sort(errors)[rank - 1])


def _weighted_quantile(parts: list[Floats], share: float = 0.9) -> float:
    values = np.concatenate(parts)
    weights = np.concatenate([np.full(len(part), 1 / len(part)) for part in parts])
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][min(int(np.searchsorted(reached, share)), len(values) - 1)])
