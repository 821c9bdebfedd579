"""Boxes settled one by one, each on a table of its own: for layers of which no two are alike.

There the stages near the best bound of all boxes are too many to list at once, but those of one
narrow box under its own multipliers are few. A box whose table is still too large is split.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, replace

import numpy as np

from foreplan.solvers._bound_pricing import BoundPricing
from foreplan.solvers._chain_box import Box
from foreplan.solvers._chain_search import Search
from foreplan.solvers._stage_arcs import stage_costs
from foreplan.solvers._stage_filter import filter_stages
from foreplan.solvers._stage_table import TablePricing, build_table
from foreplan.solvers.chain_problem import FloatArray

_WIDE = 2e-3
"""Width, relative to the bound, of a box that is split rather than given many labels."""
_FEW = 3_000
"""Labels that it may have."""
_THIN = 1e-4
"""The same below which more labels are allowed instead of a further split."""
_FIRST_STEP, _LEAST_STEP = 1e-3, 3e-4
"""Relative distance of a box's first target from its bound, and below which it is split."""
_LABELS, _MOST_LABELS = 100_000, 6_400_000
"""Labels of a box's table: at first, and after which it is left with the bound it has."""
_LABELS_EACH = 1_000
"""Labels listed that count as one evaluation: they take about as long."""


@dataclass(slots=True)
class _Work:
    """A box, the distance of its next target and the labels it may have.

    Attributes:
        box: the part of the plane.
        step: distance of the next target, relative to the bound.
        labels: how many its table may have.
        known: ``[K, L, L+1]`` bounds on stages under the box's multipliers, from its last table.
    """

    box: Box
    step: float = _FIRST_STEP
    labels: int = _LABELS
    known: FloatArray | None = None


def settle_boxes(search: Search, bounds: BoundPricing, frontier: list[Box]) -> list[Box]:
    """Split and list boxes, the one with the least bound first, until all reach the stop value.

    Args:
        search: holds the incumbent.
        bounds: stage bounds.
        frontier: boxes that hold everything of interest.

    Returns:
        Boxes that hold everything not proven to be no better than the incumbent, with bounds.
    """
    tie = itertools.count()
    heap = [(box.bound, next(tie), _Work(box)) for box in frontier]
    heapq.heapify(heap)
    left = []
    while heap and heap[0][0] < search.stop and search.evaluations < search.max_evaluations:
        work = heapq.heappop(heap)[2]
        if work.box.stuck:
            left.append(work.box)
            continue
        for child in _advance(search, bounds, work):
            if child.box.bound < math.inf:
                heapq.heappush(heap, (child.box.bound, next(tie), child))
    boxes = [*left, *(item[2].box for item in heap)]
    return sorted(boxes, key=lambda box: box.bound)


def _advance(search: Search, bounds: BoundPricing, work: _Work) -> list[_Work]:
    """One step of one box: price it, split it, or raise its bound on a table."""
    box = work.box
    if not box.priced:
        search.expand(bounds, box)
        return [work]
    width = search.width(box) / max(abs(box.bound), 1e-300)
    most = work.labels if width <= _WIDE else _FEW
    target = min(search.stop, box.bound + work.step * abs(box.bound))
    keep = filter_stages(search, bounds, [box], box.multipliers, target, known=work.known)
    table = build_table(search.model, keep, most)
    spent = most if table is None else len(table.parent)
    search.evaluations += spent // _LABELS_EACH
    if table is None:
        if width > _WIDE:
            return _split(search, work)
        if work.step > _LEAST_STEP:
            work.step /= 4
            return [work]
        if width > _THIN:
            return _split(search, work)
        work.labels *= 8
        box.stuck = work.labels > _MOST_LABELS
        return [work]
    pricing = TablePricing(table)
    # A stage that was to be listed costs what its cheapest row does, or more than its slack.
    listed, _ = stage_costs(
        table.arc_start, table.arc_stop, table.rows, *box.high, search.weights(box.multipliers)
    )
    work.known = np.where(
        keep.slack > -math.inf, np.maximum(keep.least, np.minimum(listed, keep.slack)), keep.least
    )
    inside = replace(box, view=pricing.view(), priced=False, valid=math.inf, room=math.inf)
    rest = search.run(pricing, [inside])
    box.bound = max(box.bound, min(rest[0].bound if rest else math.inf, target))
    if box.bound < min(target, search.stop):
        box.stuck = True
    if spent < most // 8:
        work.step *= 4
    return [work]


def _split(search: Search, work: _Work) -> list[_Work]:
    parts = search.split(work.box)
    return [_Work(part, max(work.step, _FIRST_STEP), work.labels) for part in parts]
