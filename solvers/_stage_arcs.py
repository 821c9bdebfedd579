"""What is asked of all arcs (type k, layers ``[a, b)``) of a table of stage labels at once.

The cheapest label of each, and which labels are worth keeping.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foreplan._compiled import compiled
from foreplan.solvers._stage_labels import COST2, DECODE, OMEGA, PREFILL


@compiled
def stage_costs(
    arc_start: Any,
    arc_stop: Any,
    rows: Any,
    max_prefill: float,
    max_decode: float,
    weights: Any,
) -> Any:
    """Cheapest stage of every arc under caps.

    Args:
        arc_start: ``[K, L, L+1]`` first label of each arc.
        arc_stop: ``[K, L, L+1]`` one past its last label.
        rows: ``[N, 5]`` labels.
        max_prefill: seconds a stage may take.
        max_decode: seconds a stage may take.
        weights: ``[5]`` linear form over label columns.

    Returns:
        ``cost[K, L, L+1]`` (``inf`` if none) and the label that attains it (-1 if none).
    """
    n_types, n_layers = arc_start.shape[0], arc_start.shape[1]
    cost = np.full((n_types, n_layers, n_layers + 1), np.inf)
    pick = np.full((n_types, n_layers, n_layers + 1), -1, dtype=np.int64)
    w0, w1, w3, w4 = weights[0], weights[1], weights[3], weights[4]
    for k in range(n_types):
        for a in range(n_layers):
            for b in range(a + 1, n_layers + 1):
                best, label = np.inf, -1
                for i in range(arc_start[k, a, b], arc_stop[k, a, b]):
                    if rows[i, PREFILL] <= max_prefill and rows[i, DECODE] <= max_decode:
                        value = (
                            w0 * rows[i, PREFILL]
                            + w1 * rows[i, DECODE]
                            + w3 * rows[i, OMEGA]
                            + w4 * rows[i, COST2]
                        )
                        if value < best:
                            best, label = value, i
                cost[k, a, b] = best
                pick[k, a, b] = label
    return cost, pick


@compiled
def thin_out(arc_start: Any, arc_stop: Any, rows: Any, weights: Any, high: Any, slack: Any) -> Any:
    """Leave out stages that no chain better than a target contains.

    Args:
        arc_start: ``[K, L, L+1]`` first label of each arc.
        arc_stop: ``[K, L, L+1]`` one past its last label.
        rows: ``[N, 5]`` labels.
        weights: ``[5]`` linear form over label columns.
        high: ``[2]`` largest prefill and decode of a stage.
        slack: ``[K, L, L+1]`` value of the form at which a stage is too dear.

    Returns:
        New ``arc_start`` and ``arc_stop``, and the indices of the labels kept.
    """
    kept = np.empty(len(rows), dtype=np.int64)
    start, stop = np.zeros_like(arc_start), np.zeros_like(arc_stop)
    size = 0
    for k in range(arc_start.shape[0]):
        for a in range(arc_start.shape[1]):
            for b in range(a + 1, arc_start.shape[2]):
                start[k, a, b] = size
                most = slack[k, a, b]
                for i in range(arc_start[k, a, b], arc_stop[k, a, b]):
                    if rows[i, PREFILL] <= high[0] and rows[i, DECODE] <= high[1]:
                        value = 0.0
                        for q in range(5):
                            value += weights[q] * rows[i, q]
                        if value < most:
                            kept[size] = i
                            size += 1
                stop[k, a, b] = size
    return start, stop, kept[:size]
