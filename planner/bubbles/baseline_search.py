"""`searched_baselines`: `baselines.py` in every form that a search knows, the fastest kept."""

from __future__ import annotations

import functools
from collections.abc import Callable

from foreplan.errors import InfeasibleError, SpecError
from foreplan.planner.bubbles.backbone import BackboneTimeline, bare_decision
from foreplan.planner.bubbles.baselines import balanced, first_stage, three_phase
from foreplan.planner.bubbles.decision import BackboneStage, BubblesDecision
from foreplan.planner.bubbles.filling import Filling, fill
from foreplan.planner.bubbles.layouts import Layout
from foreplan.planner.bubbles.replays import Replay, lacks
from foreplan.planner.bubbles.search import BubbleSearch


def searched_baselines(search: BubbleSearch) -> dict[str, BubblesDecision | str]:
    """The fastest form of each baseline that fits, or why none does.

    Args:
        search: its layouts, cuts and numbers of encoder stages are tried.

    Raises:
        MissingDataError: a work without a price.
    """
    problem, name = search.problem, search.problem.workload.schedule
    made: dict[str, list[Callable[[], BubblesDecision]]] = {}

    def bare(layout: Layout, stages: tuple[BackboneStage, ...]) -> BubblesDecision:
        return bare_decision(search.step(layout), name, layout.microbatches, stages=stages)

    def chain(layout: Layout, chunks: int) -> BubblesDecision:
        return balanced(
            search.step(layout), problem.costs, name, layout.microbatches, chunks,
            search.chain_cuts(layout, chunks),
        )  # fmt: skip

    for layout in search.layouts:
        step = search.step(layout)
        stages = search.stages(layout)
        (cut,) = search.cuts(layout, 0)
        made.setdefault("encoders on the first stage", []).append(
            lambda step=step, layout=layout, cut=cut: first_stage(step, bare(layout, cut))  # type: ignore[misc]
        )
        one = made.setdefault("balanced chain of encoder and backbone", [])
        for chunks in sorted({1, layout.plan.chunks}):
            one.append(functools.partial(chain, layout, chunks))
        for count in stages:
            for cut in search.cuts(layout, count):
                made.setdefault("three phases", []).append(
                    lambda step=step, layout=layout, cut=cut, count=count: three_phase(  # type: ignore[misc]
                        step, bare(layout, cut), count
                    )
                )
            for timeline in search.timelines(layout, None, count):
                made.setdefault("coarse filling", []).append(
                    functools.partial(_coarse, search, timeline, count)
                )
    return {kind: _quickest(search, options) for kind, options in made.items()}


def _quickest(
    search: BubbleSearch, options: list[Callable[[], BubblesDecision]]
) -> BubblesDecision | str:
    """The fastest of the options that fit, or why none does."""
    replays: list[Replay] = []
    reason = "no form of it"
    for option in options:
        try:
            replay = search.replay(option())
        except (SpecError, InfeasibleError) as error:
            reason = str(error)
            continue
        lacking = lacks(search.problem, replay)
        if lacking is None:
            replays.append(replay)
        else:
            reason = lacking
    if not replays:
        return reason
    return min(replays, key=lambda replay: replay.total_s).decision


def _coarse(search: BubbleSearch, timeline: BackboneTimeline, stages: int) -> BubblesDecision:
    cap = search.max_live(timeline, stages)
    if cap == 0:
        raise InfeasibleError("one micro-batch of the encoders does not fit")
    filled = fill(Filling(timeline, stages, None, "coarse", max_live=cap))
    if filled is None:
        raise InfeasibleError("no order keeps the encoders' activations in memory")
    return filled.decision
