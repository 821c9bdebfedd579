"""`searched_baselines`: `baselines.py` in every form that a search knows, the fastest kept."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

from foreplan.errors import InfeasibleError, SpecError
from foreplan.planner.bubbles.backbone import BackboneTimeline, bare_decision
from foreplan.planner.bubbles.baselines import balanced, chain_busy_s, first_stage, three_phase
from foreplan.planner.bubbles.decision import BackboneStage, BubblesDecision
from foreplan.planner.bubbles.filling import Filling, fill
from foreplan.planner.bubbles.layouts import CLOSER, Layout
from foreplan.planner.bubbles.replays import Replay, lacks
from foreplan.planner.bubbles.search import REJECTED, BubbleSearch

CHAIN = "balanced chain of encoder and backbone"
#: Layouts whose chain is weighed on every order of unlike devices, and chains that are simulated
#: beside those of the layouts that are searched.
ORDERED, CHAINS = 2, 8


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
        one = made.setdefault(CHAIN, [])
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
    further = {CHAIN: (functools.partial(chain, *form) for form in _chains(search))}
    return {
        kind: _quickest(search, [*options, *further.get(kind, ())])
        for kind, options in made.items()
    }


def _chains(search: BubbleSearch) -> list[tuple[Layout, int]]:
    """Chains on unlike devices that no searched layout has, with their chunks, quickest first.

    The estimate by which layouts are searched knows the backbone alone, in at least a layer a
    virtual stage; a chain gives slow devices layers of the encoder instead. Layouts are compared by
    what the busiest rank computes, on the cluster's own order and, the best of them, on every one.
    """
    if search.by_memory or len(search.problem.workload.encoders) != 1:
        return []
    known = {(x.plan, chunks) for x in search.layouts for chunks in (1, x.plan.chunks)}
    busy: dict[tuple[Layout, int], float] = {}

    def weigh(layouts: list[Layout]) -> None:
        for layout in layouts:
            with contextlib.suppress(SpecError):
                busy[layout, layout.plan.chunks] = chain_busy_s(
                    search.step(layout), search.problem.costs, layout.microbatches,
                    layout.plan.chunks,
                )  # fmt: skip

    unlike = [layout for layout in search.found if search.orders(layout)]
    weigh(unlike[: CLOSER + REJECTED])
    for layout, _ in sorted(busy, key=busy.__getitem__)[:ORDERED]:
        weigh(search.orders(layout))
    new = [form for form in busy if (form[0].plan, form[1]) not in known]
    return sorted(new, key=busy.__getitem__)[:CHAINS]


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
