"""Mutants of a pipeline's schedule: the simulator shows or refuses what was broken."""

from __future__ import annotations

import itertools

from foreplan.cost_models.pipeline import given_costs, pipeline_schedule
from foreplan.cost_models.schedule import COMPUTE, Schedule
from foreplan.cost_models.schedule_builder import ScheduleBuilder
from foreplan.cost_models.simulator import simulate
from foreplan.errors import SpecError


def wanted(schedule: Schedule) -> list[tuple[int, int, bool]]:
    """(pass, pass whose output it needs, whether that travels) of an unfused pipeline."""
    passes = {
        (a.op, a.stage, a.microbatch): i for i, a in enumerate(schedule) if a.op in ("F", "B", "W")
    }
    last = max(stage for _, stage, _ in passes)
    found = []
    for (op, stage, batch), i in passes.items():
        if op == "F" and stage > 0:
            found.append((i, passes["F", stage - 1, batch], True))
        if op == "B" and stage < last:
            found.append((i, passes["B", stage + 1, batch], True))
        if op != "F":
            found.append((i, passes["F" if op == "B" else "B", stage, batch], False))
    return found


def unlinked(schedule: Schedule) -> list[int]:
    """Passes whose dependencies do not lead to what they need."""

    def sources(i: int) -> set[int]:
        direct = schedule[i].dependencies
        return set(direct).union(*(sources(d) for d in direct))

    return [i for i, other, _ in wanted(schedule) if other not in sources(i)]


def too_early(schedule: Schedule) -> list[int]:
    """Passes that start before what they need has ended and travelled for 10 s."""
    timeline = simulate(schedule, given_costs(1.0, 1.0, 1.0, 10.0))
    return [
        i
        for i, other, travels in wanted(schedule)
        if timeline.start_s[i] < timeline.end_s[other] + 10.0 * travels
    ]


def rebuilt(schedule: Schedule, order: list[int]) -> Schedule:
    """The schedule with its actions in another order, or without those left out."""
    place = {old: new for new, old in enumerate(order)}
    builder = ScheduleBuilder(schedule.devices)
    for old in order:
        a = schedule[old]
        builder.add(
            a.op, a.rank, a.work, stage=a.stage, microbatch=a.microbatch, resources=a.resources,
            dependencies=[place[d] for d in a.dependencies if d in place],
        )  # fmt: skip
    return builder.build()


def test_a_dropped_transfer_is_caught() -> None:
    schedule = pipeline_schedule("zb-h1", stages=3, microbatches=4)
    assert unlinked(schedule) == too_early(schedule) == []
    transfers = [i for i, a in enumerate(schedule) if a.op in ("send", "recv")]
    assert len(transfers) == 32
    early = 0
    for dropped in transfers:
        mutant = rebuilt(schedule, [i for i in range(len(schedule)) if i != dropped])
        assert len(unlinked(mutant)) >= 1
        early += bool(too_early(mutant))
    assert early > 16  # the others start late enough for another reason


def test_two_swapped_passes_deadlock_or_stay_right() -> None:
    schedule = pipeline_schedule("zb-h1", stages=3, microbatches=4)
    compute = [schedule.of_rank(r) for r in range(3)]
    outcomes = {"deadlock": 0, "lawful": 0}
    for mine in compute:
        passes = [i for i in mine if schedule[i].resources == (COMPUTE,)]
        for a, b in itertools.combinations(passes, 2):
            order = list(range(len(schedule)))
            order[a], order[b] = b, a
            try:
                early = too_early(rebuilt(schedule, order))
            except SpecError:  # of `simulate`, which has nothing else to refuse here
                outcomes["deadlock"] += 1
            else:
                outcomes["lawful"] += 1
                assert early == []
    assert min(outcomes.values()) > 20
