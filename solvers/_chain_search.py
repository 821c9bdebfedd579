"""Branch and bound over boxes of the two bottlenecks.

A box ``[pl, ph] x [dl, dh]`` holds the chains whose ``max P`` and ``max D`` lie in it. With caps
``ph, dh`` on every stage and hop the rest of the law is additive but for the decode round and the
budgets, which multipliers ``lambda in [0, 1]``, ``u, w >= 0`` price::

    bound = min over chains within caps of
              sum P + (n-1) lambda sum D + (theta + u) sum omega + w sum cost2
          + (Mp-1) pl + (n-1) (1-lambda) m dl - u max_omega - w max_cost2

-> Implemented in: ``_chain_path.cheapest_path`` (the minimum), ``Search.price`` (the bound),
``_chain_ascent.ascend`` (the multipliers), ``Search.split`` (the boxes). Stages that no better
chain contains are dropped on the way, and what then remains of a box is settled exactly by label
setting (``_chain_view``).

Where stage costs come from is the ``Pricing``'s business: a table of all stages worth having, or
bounds that need no table.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, field, replace

import numpy as np

from foreplan.solvers._chain_ascent import ascend
from foreplan.solvers._chain_box import Box, Multipliers, Price, Pricing
from foreplan.solvers._chain_devices import CountedDevices
from foreplan.solvers._chain_model import ChainModel, tally
from foreplan.solvers._chain_path import cheapest_path, completion_costs
from foreplan.solvers._chain_view import settle, thin
from foreplan.solvers._chain_within import Within
from foreplan.solvers.chain_problem import FloatArray
from foreplan.solvers.chain_score import ChainAssignment, ChainStage, evaluate

_NARROW = 1e-3
"""Width, relative to the bound, of a box that is given more labels rather than split."""
_MOST_LABELS = 4_000_000
"""Labels after which a box is left with the bound it has."""
_LIFTS = 20
"""Times that the bounds of a cheapest chain are lifted before another is looked for."""
_LIFT = 1e-5
"""Relative lift from which that is worth it."""
_FLOAT_GAP = 1e-12
"""Least gap that sums of floats can prove."""


@dataclass(slots=True)
class Search:
    """State of one solve.

    Attributes:
        model: the problem.
        gap: relative gap to prove.
        cutoff: objective beyond which nothing is looked for.
        max_evaluations: bound evaluations allowed.
        goal: an incumbent at or below this ends the search.
        within: limits on times that every answer is to meet.
        best: incumbent.
        objective: its objective, ``inf`` without one.
        evaluations: spent so far.
        dropped: bound on what was cut off boxes because it reached the stop value.
        devices: what tables of completions and labels count so far.
    """

    model: ChainModel
    gap: float
    cutoff: float
    max_evaluations: int
    goal: float = -math.inf
    within: Within | None = None
    best: ChainAssignment | None = None
    objective: float = math.inf
    evaluations: int = 0
    dropped: float = math.inf
    devices: CountedDevices = field(init=False)
    _tie: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.devices = self.model.devices

    @property
    def stop(self) -> float:
        """Bound from which a box holds nothing worth finding."""
        if self.objective <= self.goal:
            return -math.inf
        known = min(self.objective, self.cutoff)
        return known - max(self.gap, _FLOAT_GAP) * abs(known) if known < math.inf else known

    @property
    def has_budgets(self) -> bool:
        """Whether omega or cost2 is limited."""
        problem = self.model.problem
        return problem.max_omega is not None or problem.max_cost2 is not None

    @property
    def needs_labels(self) -> bool:
        """Whether boxes do not close by splitting alone."""
        sums = self.model.sums_decode and self.model.problem.decode_microbatches > 1
        return self.has_budgets or sums or self.within is not None

    def run(self, pricing: Pricing, boxes: list[Box]) -> list[Box]:
        """Work on boxes until each is bounded by the stop value, or the evaluations are spent.

        Args:
            pricing: stage costs.
            boxes: where to look.

        Returns:
            Boxes that hold everything not looked at, best bound first.
        """
        heap = [(box.bound, next(self._tie), box) for box in boxes]
        heapq.heapify(heap)
        stuck = []
        while heap and heap[0][0] < min(self.stop, pricing.target):
            if self.evaluations >= self.max_evaluations:
                break
            for child in self.expand(pricing, heapq.heappop(heap)[2]):
                if child.stuck:
                    stuck.append(child)
                elif child.bound < math.inf:
                    heapq.heappush(heap, (child.bound, next(self._tie), child))
        return sorted([*stuck, *(item[2] for item in heap)], key=lambda box: box.bound)

    def coarsen(
        self, pricing: Pricing, boxes: list[Box], reach: float, evaluations: int
    ) -> list[Box]:
        """Split boxes until those near the best bound are narrow.

        Args:
            pricing: stage costs.
            boxes: where to look.
            reach: relative distance from the best bound that is near.
            evaluations: how many may be spent.

        Returns:
            Boxes that hold everything not looked at, best bound first.
        """
        heap = [(box.bound, next(self._tie), box) for box in boxes]
        heapq.heapify(heap)
        aside: list[Box] = []
        limit = min(self.max_evaluations, self.evaluations + evaluations)
        while heap and self.evaluations < limit:
            floor = min(aside[0].bound if aside else math.inf, heap[0][0])
            if heap[0][0] >= self.stop or heap[0][0] > floor + reach * abs(floor):
                break
            box = heapq.heappop(heap)[2]
            if box.priced and self.width(box) <= 0.5 * reach * abs(box.bound):
                aside.append(box)
                continue
            for child in self.expand(pricing, box):
                if child.stuck:
                    child.stuck = False
                    aside.append(child)
                elif child.bound < math.inf:
                    heapq.heappush(heap, (child.bound, next(self._tie), child))
        return sorted([*aside, *(item[2] for item in heap)], key=lambda box: box.bound)

    def expand(self, pricing: Pricing, box: Box) -> list[Box]:
        """Price a box and settle it if that is cheap, or split it."""
        if box.priced:
            return self.split(box)
        price = ascend(self, pricing, box)
        box.raw = price.bound
        box.bound = max(box.bound, min(price.bound, pricing.target, box.valid))
        box.multipliers, box.worst, box.priced = price.multipliers, price.worst, True
        stop = min(self.stop, pricing.target)
        if box.view is not None and box.bound < stop:
            thinned = stop < math.inf and stop - box.bound < 0.7 * box.room
            if thinned:
                thin(self, box, price, stop)
            if (thinned or self.needs_labels) and box.bound < stop:
                settle(self, pricing, box, price)
        return [box]

    def price(self, pricing: Pricing, box: Box, multipliers: Multipliers) -> Price:
        """Bound of a box under given multipliers; its chain may become the incumbent."""
        model, problem = self.model, self.model.problem
        self.evaluations += 1
        weights = self.weights(multipliers)
        arc_cost = pricing.costs(box, weights)
        hop, back = self.scalarised(box, float(weights[1]))
        # Bounds that are not those of the path's own multipliers make tangents that mislead.
        for _ in range(_LIFTS if self.has_budgets else 1):
            total, path, needed = cheapest_path(arc_cost, hop, back, model.by_first, model.counts)
            rows = pricing.rows(path)
            if pricing.lift <= _LIFT * abs(total):
                break
        constant = self.constant(box, multipliers)
        price = Price(
            bound=total + constant,
            slope=(0.0, 0.0, 0.0),
            worst=(0.0, 0.0),
            multipliers=multipliers,
            weights=weights,
            arc_cost=arc_cost,
            hop=hop,
            back=back,
            constant=constant,
            needed=needed,
        )
        if total == math.inf:
            return price
        types = path[:, 0].tolist()
        sums = tally(model, types, rows)
        price.worst = (sums.prefill_max_s, sums.decode_max_s)
        low_round = problem.decode_microbatches * box.low[1]
        price.slope = (
            model.decode_rounds * (sums.decode_sum_s - low_round),
            sums.omega - problem.omega_limit if problem.max_omega is not None else 0.0,
            sums.cost2 - problem.cost2_limit if problem.max_cost2 is not None else 0.0,
        )
        offered = pricing.offer(path)
        if offered is not None:
            sums = tally(model, types, offered)
            if sums.omega <= problem.omega_limit and sums.cost2 <= problem.cost2_limit:
                if sums.prefill_max_s <= box.high[0] and sums.decode_max_s <= box.high[1]:
                    price.worst = (sums.prefill_max_s, sums.decode_max_s)
                if sums.objective < min(self.objective, self.cutoff):
                    self.accept(pricing.stages(path))
        return price

    def completions(self, price: Price) -> FloatArray:
        """Scalarised completion costs behind a price; few prices are asked for them."""
        if price.node is None or price.counted is not self.devices:
            model = self.model
            price.counted = self.devices
            price.node = completion_costs(
                price.arc_cost, price.hop, price.back, model.by_first, self.devices.used,
                self.devices.stride, model.counts,
            )  # fmt: skip
        return price.node

    def weights(self, multipliers: Multipliers) -> FloatArray:
        """``[5]`` linear form over stage rows that multipliers make."""
        lam, u, w = multipliers
        theta = self.model.problem.theta
        return np.array([1.0, self.model.decode_rounds * lam, 0.0, theta + u, w])

    def constant(self, box: Box, multipliers: Multipliers) -> float:
        """The part of a box's bound that no chain changes, seconds."""
        problem, (lam, u, w) = self.model.problem, multipliers
        round_s = (1 - lam) * problem.decode_microbatches * box.low[1]
        constant = self.model.prefill_rounds * box.low[0] + self.model.decode_rounds * round_s
        constant -= u * problem.omega_limit if problem.max_omega is not None else 0.0
        constant -= w * problem.cost2_limit if problem.max_cost2 is not None else 0.0
        return constant

    def hops(self, box: Box) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Prefill, decode and return hops, ``inf`` where one exceeds the caps of a box."""
        model = self.model
        hop_p, hop_d, back = (
            np.where(x <= cap, x, math.inf)
            for x, cap in (
                (model.problem.link_prefill_s, box.high[0]),
                (model.link_decode_s, box.high[1]),
                (model.back_decode_s, box.high[1]),
            )
        )
        return hop_p, hop_d, back

    def scalarised(self, box: Box, weight: float) -> tuple[FloatArray, FloatArray]:
        """Costs of hops and of return hops under a weight of decode time."""
        hop_p, hop_d, back = self.hops(box)
        with np.errstate(invalid="ignore"):
            return (
                np.where(np.isfinite(hop_p + hop_d), hop_p + weight * hop_d, math.inf),
                np.where(np.isfinite(back), weight * back, math.inf),
            )

    def accept(self, stages: tuple[ChainStage, ...]) -> None:
        """Keep a chain if the evaluator agrees that it is the best so far."""
        assignment = ChainAssignment(stages)
        score, objective = evaluate(self.model.problem, assignment), math.inf
        if score.feasible:
            objective = score.objective
            if self.within is not None:
                objective = self.within.objective(self.model.problem, score)
        if objective < min(self.objective, self.cutoff):
            self.best, self.objective = assignment, objective

    def _weights(self) -> tuple[float, float]:
        """Seconds of objective per second of max P and max D."""
        model = self.model
        rounds = model.decode_rounds * model.problem.decode_microbatches
        return (
            float(model.prefill_rounds) if model.caps_prefill else 0.0,
            float(rounds) if model.caps_decode else 0.0,
        )

    def _widths(self, box: Box) -> tuple[list[float], list[float]]:
        """Upper ends of a box that are still of interest, and what its width is worth, seconds."""
        high, width = [box.high[0], box.high[1]], [0.0, 0.0]
        for q, weight in enumerate(self._weights()):
            linear = weight * (1 - box.multipliers[0]) if q == 1 else weight
            if linear > 0 and self.stop < math.inf:
                # A bottleneck beyond this makes the bound itself reach the stop value.
                reach = box.low[q] + (self.stop - box.raw) / linear
                high[q] = max(min(high[q], reach * (1 + 1e-12)), box.low[q])
            width[q] = weight * (high[q] - box.low[q]) if weight else 0.0
        return high, width

    def width(self, box: Box) -> float:
        """What may still be gained by splitting a box, seconds."""
        return sum(self._widths(box)[1])

    def split(self, box: Box) -> list[Box]:
        """Cut a box where its chain's bottleneck lies, at most in the middle."""
        weight = self._weights()
        high, width = self._widths(box)
        excess = [
            min(weight[q] * (box.worst[q] - box.low[q]), width[q]) if weight[q] else 0.0
            for q in range(2)
        ]
        axis = 0 if excess[0] >= excess[1] else 1
        # Prices of budgets blur where the bottleneck lies.
        if excess[axis] <= (0.1 if self.has_budgets else 0.0) * max(width):
            axis = 0 if width[0] >= width[1] else 1
        if box.starved and width[axis] <= _NARROW * abs(box.bound):
            box.labels *= 8
            box.priced = False
            box.stuck = box.labels > _MOST_LABELS
            return [box]
        if high != [box.high[0], box.high[1]]:
            self.dropped = min(self.dropped, self.stop)
        cut, below = self._cut(box, high, axis)
        if not box.low[axis] <= below < high[axis]:
            axis = 1 - axis
            cut, below = self._cut(box, high, axis)
        low = box.low[axis]
        if not (weight[axis] and low <= below < high[axis]):
            box.stuck = True
            return [box]
        lower, upper = replace(box), replace(box)
        lower.high = (below, high[1]) if axis == 0 else (high[0], below)
        lower.priced = False
        upper.high = (high[0], high[1])
        upper.low = (cut, box.low[1]) if axis == 0 else (box.low[0], cut)
        upper.raw += weight[axis] * (1 - box.multipliers[0] if axis == 1 else 1.0) * (cut - low)
        upper.bound = max(box.bound, min(upper.raw, box.valid))
        upper.priced = not self.needs_labels
        return [lower, upper]

    @staticmethod
    def _cut(box: Box, high: list[float], axis: int) -> tuple[float, float]:
        """Where an axis is cut: least value of the upper part and largest of the lower."""
        low, middle = box.low[axis], 0.5 * (box.low[axis] + high[axis])
        cut = box.worst[axis] if low < box.worst[axis] <= middle else middle
        return cut, math.nextafter(cut, -math.inf)
