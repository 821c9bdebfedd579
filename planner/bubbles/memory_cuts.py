"""`MemoryCuts`: stages of unlike size that every rank can hold, where those cut by time do not fit.

One stage a rank. What a rank needs follows from its layers and from the order of its passes alone:
model states, workspace, and for every micro-batch in flight its activations (`memory.py`). The cut
with the shortest longest stage among those that fit is found by dynamic programming
(`cuts.min_max_cuts`), exactly.

What encoders hold beside the backbone depends on where they run:

- *colocated* in ``k`` stages: their states, and of ``pp / k`` pipelines together at least as many
  micro-batches as the first rank has forward passes before a backward pass, dealt evenly; features
  that wait on the first rank count for all micro-batches. More of them may have to be held where
  the backbone leaves no time for their backward passes, so that there is a second cut: that with
  room for most;
- *first stage*: all of it on rank 0, in flight from a forward pass to the gradient of its input;
- *chain*: encoder and backbone layers are cut together.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Sequence

from foreplan.cost_models.costs import CostBook
from foreplan.errors import InfeasibleError
from foreplan.planner.base import Problem
from foreplan.planner.bubbles.actions import Step
from foreplan.planner.bubbles.backbone import backbone_orders, layer_seconds, seconds_by_stage
from foreplan.planner.bubbles.baselines import chain_seconds
from foreplan.planner.bubbles.cuts import min_max_cuts
from foreplan.planner.bubbles.decision import BackboneStage
from foreplan.planner.bubbles.ledger import (
    backbone_states,
    capacity_bytes,
    encoder_items,
    encoder_states,
    live_bytes,
    workspace_bytes,
)
from foreplan.planner.bubbles.placement import encoder_plan, unit_cuts, whole_encoder
from foreplan.planner.bubbles.spec import BubblesWorkload
from foreplan.planner.bubbles.training_step import TrainingStep


class MemoryCuts:
    """Cuts of one layout with one stage a rank.

    Args:
        problem: model, cluster, workload.
        step: works under the layout.
        microbatches: of each pipeline.
    """

    def __init__(
        self, problem: Problem[BubblesWorkload], step: TrainingStep, microbatches: int
    ) -> None:
        self._problem, self._step, self._count = problem, step, microbatches
        plan = step.plan.model_copy(update={"chunks": 1})
        orders = backbone_orders(problem.workload.schedule, plan, microbatches)
        self._flights = [_flights(order) for order in orders]
        self._rooms = [capacity_bytes(problem, step, rank) for rank in range(plan.pp)]

    # ------------------------------------------------------------------------------- cuts

    def bare(self) -> tuple[BackboneStage, ...]:
        """Stages of the backbone without any encoder.

        Raises:
            InfeasibleError: no cut fits.
        """
        return self._backbone(lambda rank: workspace_bytes(self._step, ()))

    def first_stage(self) -> tuple[BackboneStage, ...]:
        """Stages of the backbone with all encoders on rank 0, see `bare`."""
        step = self._step
        plans = tuple(whole_encoder(each, step.plan.tp, self._count) for each in step.encoders)
        held = live_bytes(step, plans, 0)
        features = sum(step.feature_bytes(e) for e in range(len(plans)))
        return self._backbone(
            lambda rank: sum(encoder_items(step, plans, rank).values()),
            lambda rank: (held, features) if rank == 0 else (0, 0),
        )

    def colocated(self, stages: int) -> tuple[tuple[BackboneStage, ...], ...]:
        """Stages of the backbone beside encoders in so many stages, see `bare`.

        Returns:
            The fastest cut, and if it is another one that with room for most micro-batches.

        Raises:
            SpecError: fewer layers than stages of an encoder.
        """
        step = self._step
        plans = tuple(
            encoder_plan(
                tower, step.plan, stages=stages, unit_layers=None, slots=(0,) * self._count
            )
            for tower in step.encoders
        )
        waiting = self._count * sum(step.feature_bytes(e) for e in range(len(plans)))
        static = [sum(encoder_items(step, plans, rank).values()) for rank in range(step.plan.pp)]
        static[0] += waiting
        each = [live_bytes(step, plans, stage) for stage in range(stages)]

        @functools.cache
        def cut(live: int) -> tuple[BackboneStage, ...] | None:
            try:
                return self._backbone(lambda rank: static[rank] + live * each[rank % stages])
            except InfeasibleError:
                return None

        least = self._live(step.plan.pp // stages)
        if (fastest := cut(least)) is None:
            raise InfeasibleError(f"no cut leaves room for encoders in {stages} stages")
        # Room for more is never easier to find.
        sizes = range(least + 1, self._count + 1)
        more = bisect.bisect_left(sizes, True, key=lambda live: cut(live) is None)
        return tuple(dict.fromkeys((fastest, cut(least + more) or fastest)))

    def chain(self) -> list[int]:
        """Cuts of one encoder's layers followed by the backbone's, see `bare`.

        Raises:
            SpecError: fewer layers than ranks.
        """
        step, tower = self._step, self._step.encoders[0]
        split, tp = tower.layers, step.plan.tp
        whole = whole_encoder(tower, tp, self._count)
        workspace = workspace_bytes(step, (whole,))
        feature = step.feature_bytes(0)

        def need(rank: int, start: int, end: int) -> int:
            total, held, kept, ready = workspace, 0, 0, 0
            if start < split:
                mine = start, min(end, split)
                total += sum(encoder_states(step, 0, mine, tp, holders=1).values())
                units = itertools.pairwise((2 * start, *unit_cuts([mine], None)[1:]))
                held = sum(step.unit_bytes(0, tp, a, b) for a, b in units)
            if end > split:
                first, last = max(start, split) - split, end - split
                total += self._states(first, last)
                kept = step.activation_bytes(first, last)
            if start <= split < end:  # features come in here, or wait for it
                kept, ready = max(0, kept - feature), feature
                if start == split:
                    total, ready = total + feature * self._received(rank), 0
            return total + self._peak(rank, held, kept + ready)

        return self._cut(chain_seconds, need)

    # ------------------------------------------------------------------------------- inside

    def _backbone(
        self,
        beside: Callable[[int], int],
        flying: Callable[[int], tuple[int, int]] = lambda rank: (0, 0),
    ) -> tuple[BackboneStage, ...]:
        """Stages beside what else a rank holds, always and for a micro-batch in flight."""
        step = self._step
        others = [(beside(rank), *flying(rank)) for rank in range(step.plan.pp)]

        def need(rank: int, start: int, end: int) -> int:
            always, held, feature = others[rank]
            kept = max(feature, step.activation_bytes(start, end))
            return always + self._states(start, end) + self._peak(rank, held, kept)

        cuts = self._cut(layer_seconds, need)
        spans = enumerate(itertools.pairwise(cuts))
        return tuple(BackboneStage(rank=rank, start=a, end=b) for rank, (a, b) in spans)

    def _cut(
        self,
        seconds: Callable[[TrainingStep, CostBook, str], list[float]],
        need: Callable[[int, int, int], int],
    ) -> list[int]:
        """Cuts of a chain whose layers take so long on a device, each rank with its own prices."""
        count = len(self._step.devices)
        each = seconds_by_stage(seconds, self._step, self._problem.costs, count)
        return min_max_cuts(each, count, lambda rank, a, b: need(rank, a, b) <= self._rooms[rank])

    def _states(self, start: int, end: int) -> int:
        return sum(
            backbone_states(self._step, self._step.backbone.range_parameters(start, end)).values()
        )

    def _peak(self, rank: int, held: int, kept: int) -> int:
        """Most bytes of passes in flight: ``held`` up to their gradient, ``kept`` to their end."""
        return max(flying * kept + waiting * held for flying, waiting in self._flights[rank])

    def _live(self, pipelines: int) -> int:
        """Micro-batches that each encoder pipeline has to have room for.

        An even share of those that the first rank runs before it has the gradient of the first.
        One more where that is several but not all, because the filling counts a micro-batch from
        the end of its forward pass, and memory from its start (`BubbleSearch.max_live`).
        """
        share = -(-max(waiting for _, waiting in self._flights[0]) // pipelines)
        return share if share in (1, -(-self._count // pipelines)) else share + 1

    def _received(self, rank: int) -> int:
        """Micro-batches whose features lie on a rank at most, as the rank before sends them.

        It is at most its own passes in flight ahead of the gradients that come back to it; nothing
        holds a frozen encoder back.
        """
        if rank == 0 or self._step.encoder(0).frozen:
            return self._count
        ahead = max(waiting for _, waiting in self._flights[rank - 1])
        return min(self._count, ahead + max(k - w for k, w in self._flights[rank]))


def _flights(order: Sequence[Step]) -> list[tuple[int, int]]:
    """At each forward pass: passes with activations, and those without a gradient yet."""
    found, kept, waiting = set(), 0, 0
    for item in order:
        if item.op == "F":
            kept, waiting = kept + 1, waiting + 1
            found.add((kept, waiting))
        else:
            kept -= item.op in "BW"
            waiting -= item.op in "BI"
    return sorted(found)
