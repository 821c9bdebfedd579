"""The stages still in the race in one box: fewer as bounds rise, and then its best chain.

-> stages that no chain below the stop value contains are dropped: ``thin``
-> what remains is settled exactly by label setting: ``settle`` (``_chain_labels.best_chain``)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from foreplan.solvers._chain_box import Box, Price, Pricing, StageView
from foreplan.solvers._chain_labels import best_chain
from foreplan.solvers._chain_model import ALL_COUNTED, MOST_COUNTED
from foreplan.solvers._chain_path import completion_costs, through_costs
from foreplan.solvers._chain_within import FREE
from foreplan.solvers._stage_arcs import stage_costs, thin_out
from foreplan.solvers.chain_problem import FloatArray

if TYPE_CHECKING:
    from foreplan.solvers._chain_search import Search

_FACTORS = (0.0, 0.5, 0.8, 1.25, 2.0, 4.0)
"""On a box's prices of budgets: others that show which chains cannot be completed below a target.
With none of them 5.6 million labels were spent where 0.9 million do (measured)."""
_FURTHER_NODES = 1_000_000
"""Nodes of a table of completions, for each vector of used devices, up to which they are worked out
(8 bytes each, for every factor)."""


def thin(search: Search, box: Box, price: Price, stop: float) -> None:
    """Drop stages that no chain below the stop value contains, and tighten the box."""
    model, view = search.model, box.view
    assert view is not None
    through = through_costs(
        price.arc_cost,
        price.hop,
        model.by_first,
        search.devices.used,
        search.devices.stride,
        search.completions(price),
    )
    arc_start, arc_stop, kept = thin_out(
        view.arc_start,
        view.arc_stop,
        view.rows,
        price.weights,
        np.array(box.high),
        stop - price.constant - through,
    )
    box.view = StageView(arc_start, arc_stop, view.rows[kept], view.labels[kept])
    box.room, box.valid = stop - box.bound, min(stop, box.valid)
    hops = search.hops(box)
    low, high = list(box.low), list(box.high)
    for axis in range(2):
        if not (model.caps_prefill, model.caps_decode)[axis]:
            continue
        links = hops[0] if axis == 0 else np.concatenate(hops[1:])
        attained = np.concatenate([box.view.rows[:, axis], links.ravel()])
        attained = attained[(attained >= low[axis]) & (attained <= high[axis])]
        if not len(attained):
            box.bound = box.valid
            return
        low[axis], high[axis] = float(attained.min()), float(attained.max())
    box.low, box.high = (low[0], low[1]), (high[0], high[1])
    shift = search.constant(box, price.multipliers) - price.constant
    price.constant += shift
    box.raw += shift
    box.bound = max(box.bound, min(box.raw, box.valid))


def settle(search: Search, pricing: Pricing, box: Box, price: Price) -> None:
    """Look for the best chain of a box; the target grows until something lies below it."""
    model, problem, view = search.model, search.model.problem, box.view
    assert view is not None
    hop_p, hop_d, back = search.hops(box)
    law = (model.prefill_rounds, model.decode_rounds, problem.decode_microbatches)
    acts = (
        model.omega_apart,
        # A chain of more devices than there are may have a sum D beyond those of all others.
        model.sums_decode or not search.devices.every,
        problem.max_cost2 is not None,
        model.caps_prefill,
        model.caps_decode,
    )
    few = ALL_COUNTED / model.nodes
    none = np.zeros((0, 1, 1, 1, 1)), np.zeros((0, 4))
    counted, (further, prices) = None, none
    while search.evaluations < search.max_evaluations:
        if search.has_budgets and counted is not search.devices:
            counted = search.devices
            worth = len(counted.used) * model.nodes <= _FURTHER_NODES
            further, prices = _further(search, box, price) if worth else none
        stop = min(search.stop, pricing.target)
        target = stop
        if search.needs_labels:
            near = box.bound + box.step * abs(box.bound) + 1e-12
            target = min(stop, near if near < model.ceiling_s else stop)
        objective, chain, spent, gave_up = best_chain(
            view.arc_start,
            view.arc_stop,
            view.rows,
            price.arc_cost,
            hop_p,
            hop_d,
            back,
            model.by_first,
            search.devices.used,
            search.devices.stride,
            model.counts,
            search.completions(price),
            further,
            prices,
            np.array(box.low),
            np.array(box.high),
            np.array([*law, problem.theta]),
            np.array(price.multipliers),
            np.array([problem.omega_limit, problem.cost2_limit]),
            model.least,
            np.array(acts),
            FREE if search.within is None else search.within.law,
            target,
            price.constant,
            box.labels,
        )
        search.evaluations += 1 + spent // 10_000
        box.starved = bool(gave_up)
        if gave_up:
            # Completions that may use more devices than there are bound too little to end.
            missing = search.devices.missing(price.needed)
            more = None if missing is None else search.devices.counting(missing, few)
            if more is None:
                return
            search.devices = more
            continue
        box.bound = max(box.bound, objective)
        lacking = search.devices.lacking(chain[:, 0])
        if lacking is not None:
            more = search.devices.counting(lacking, MOST_COUNTED / model.nodes)
            box.starved = more is None
            if more is None:
                return
            search.devices = more
            continue
        if len(chain):
            search.accept(
                tuple(
                    pricing.stage(k, a, b, int(view.labels[label]))
                    for k, a, b, label in chain.tolist()
                )
            )
            return
        if target >= stop:
            return
        box.step *= 4


def _further(search: Search, box: Box, price: Price) -> tuple[FloatArray, FloatArray]:
    """Completions under other prices of budgets, which bound chains that spent more or less."""
    view, devices, model = box.view, search.devices, search.model
    assert view is not None
    lam, u, w = price.multipliers
    nodes, prices = [], []
    for factor in _FACTORS:
        multipliers = (lam, factor * u, factor * w)
        weights = search.weights(multipliers)
        arc, _ = stage_costs(view.arc_start, view.arc_stop, view.rows, *box.high, weights)
        hop, back = search.scalarised(box, weights[1])
        nodes.append(
            completion_costs(
                arc, hop, back, model.by_first, devices.used, devices.stride, model.counts
            )
        )
        prices.append([*multipliers, search.constant(box, multipliers)])
    return np.array(nodes), np.array(prices)
