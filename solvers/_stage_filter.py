"""What a chain better than a target can contain: the filter that makes tables of stages small."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foreplan.solvers._bound_pricing import BoundPricing
from foreplan.solvers._chain_box import Box, Multipliers, Price
from foreplan.solvers._chain_model import ChainModel
from foreplan.solvers._chain_path import completion_costs, through_costs
from foreplan.solvers._chain_search import Search
from foreplan.solvers.chain_problem import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class StageFilter:
    """What a chain better than a target can still contain.

    Attributes:
        target: objective in seconds.
        caps: ``[2]`` prefill and decode seconds that no stage may exceed.
        floors: ``[2]`` prefill and decode seconds below which no stage is the bottleneck.
        stop: ``[K, L]`` largest useful end of a stage by type and start; ``a`` or less if none.
        weights: ``[M, L, G, 5]`` linear forms over label columns by mode and start.
        ceilings: ``[M, L, G, L+1]`` their largest useful values by boundary.
        slack: ``[K, L, L+1]`` largest useful value of the first form over a whole stage.
        least: ``[K, L, L+1]`` what that form is at least, by stage.
    """

    target: float
    caps: tuple[float, float]
    floors: tuple[float, float]
    stop: IntArray
    weights: FloatArray
    ceilings: FloatArray
    slack: FloatArray
    least: FloatArray


def no_filter(model: ChainModel) -> StageFilter:
    """Every stage there is."""
    shape = (model.problem.n_types, model.problem.n_layers)
    by_mode = (len(model.modes.of), model.problem.n_layers)
    return StageFilter(
        target=math.inf,
        caps=(math.inf, math.inf),
        floors=(0.0, 0.0),
        stop=np.full(shape, model.problem.n_layers, dtype=np.int64),
        weights=np.zeros((*by_mode, 0, 5)),
        ceilings=np.zeros((*by_mode, 0, model.problem.n_layers + 1)),
        slack=np.full((*shape, model.problem.n_layers + 1), math.inf),
        least=np.full((*shape, model.problem.n_layers + 1), -math.inf),
    )


def filter_stages(
    search: Search,
    bounds: BoundPricing,
    boxes: list[Box],
    multipliers: Multipliers,
    target: float,
    only: npt.NDArray[np.bool_] | None = None,
    known: FloatArray | None = None,
) -> StageFilter:
    """Say what a chain better than a target can contain, given boxes that hold them all.

    Args:
        search: for hops and constants.
        bounds: stage bounds.
        boxes: with bounds below the target; chains outside them are not better.
        multipliers: lambda, u, w shared by all boxes here.
        target: objective, seconds.
        only: ``[K, L, L+1]`` stages to consider at all, for a search that proves nothing.
        known: ``[K, L, L+1]`` bounds on stages under the same multipliers and caps, from a table.
    """
    model = search.model
    n_types, n_layers = model.problem.n_types, model.problem.n_layers
    slack = np.full((n_types, n_layers, n_layers + 1), -math.inf)
    margin = slack.copy()
    least = np.full(slack.shape, math.inf)
    for box in boxes:
        search.evaluations += 1
        price = search.price(bounds, box, multipliers)
        weights, arc = price.weights, price.arc_cost
        if known is not None:
            arc = np.maximum(arc, known)
        room = _room(search, price, arc, target)
        if len(boxes) == 1 and target < math.inf:
            # The pool's bounds are those of other stages; their own say more.
            kept = arc <= room
            own = bounds.tuned_bounds(kept, weights)
            arc[kept] = np.maximum(arc[kept], own[kept])
            room = _room(search, price, arc, target)
        kept = arc <= room
        slack = np.maximum(slack, np.where(kept, room, -math.inf))
        least = np.minimum(least, arc)
        with np.errstate(invalid="ignore"):
            margin = np.maximum(margin, np.where(kept, room - arc, -math.inf))
    if only is not None:
        slack = np.where(only, slack, -math.inf)
    caps = (max(box.high[0] for box in boxes), max(box.high[1] for box in boxes))
    forms, tops = bounds.forms(slack, margin, weights, caps)
    return StageFilter(
        target=target,
        caps=caps,
        floors=(min(box.low[0] for box in boxes), min(box.low[1] for box in boxes)),
        stop=np.where(slack > -math.inf, np.arange(n_layers + 1), 0).max(axis=2).astype(np.int64),
        weights=forms,
        ceilings=tops,
        slack=slack,
        least=least,
    )


def _room(search: Search, price: Price, arc: FloatArray, target: float) -> FloatArray:
    """``[K, L, L+1]`` cost at which a stage is too dear for any chain below the target."""
    model, devices = search.model, search.devices
    node = completion_costs(
        arc, price.hop, price.back, model.by_first, devices.used, devices.stride, model.counts
    )
    through = through_costs(arc, price.hop, model.by_first, devices.used, devices.stride, node)
    reached = through < math.inf
    return np.where(reached, target - price.constant - np.where(reached, through, 0.0), -math.inf)
