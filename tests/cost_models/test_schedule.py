from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.cost_models.costs import Copy, HostLaunch, Segment
from foreplan.cost_models.schedule import MOST_ACTIONS, Action, Memory, Schedule
from foreplan.cost_models.schedule_builder import ScheduleBuilder
from foreplan.errors import SpecError


def test_actions_come_back_as_they_were_added() -> None:
    builder = ScheduleBuilder(["a100-80g", "t4"])
    first = builder.add("F", 0, Segment("F"), stage=0, microbatch=2)
    second = builder.add(
        "send", 1, Copy(8), stage=1, microbatch=2, step=5, peer=0, dependencies=(first,),
        resources=("send:0", "shared:ib"), memory=Memory("kv_cache", 3, 4), rendezvous=9,
        pressure=0.25,
    )  # fmt: skip
    schedule = builder.build({"schedule": "by hand"})
    assert (first, second, len(builder), len(schedule)) == (0, 1, 2, 2)
    assert list(schedule) == [
        Action("F", 0, Segment("F"), stage=0, microbatch=2),
        Action(
            "send", 1, Copy(8), stage=1, microbatch=2, step=5, peer=0, dependencies=(0,),
            resources=("send:0", "shared:ib"), memory=Memory("kv_cache", 3, 4), rendezvous=9,
            pressure=0.25,
        ),
    ]  # fmt: skip
    assert schedule[-1] == schedule[1]
    with pytest.raises(IndexError):
        schedule[2]
    assert schedule.ranks == 2
    assert [schedule.of_rank(r) for r in (0, 1)] == [[0], [1]]
    assert schedule.notes == {"schedule": "by hand"}


def test_labels() -> None:
    assert Action("F", 0, HostLaunch(0), stage=3, microbatch=1).label == "3F1"
    assert Action("decode", 0, HostLaunch(0), microbatch=1, step=7).label == "decode1.7"
    assert Action("all_reduce", 0, HostLaunch(0)).label == "all_reduce"


def test_equal_works_and_resource_sets_are_kept_once() -> None:
    builder = ScheduleBuilder(["cpu"])
    for k in range(100):
        # New but equal objects each time, of two kinds.
        builder.add("F", 0, Segment("F", ((Copy(k % 2), 1),)), resources=("compute", f"s{k % 3}"))
    schedule = builder.build()
    assert len(schedule.works) == 2
    assert schedule.work.tolist() == [0, 1] * 50
    assert len(schedule.resource_sets) == 3
    assert schedule.resources == ("compute", "s0", "s1", "s2")


def test_dependencies_may_name_later_actions() -> None:
    builder = ScheduleBuilder(["cpu", "cpu"])
    builder.add("recv", 0, HostLaunch(0), dependencies=(1,))
    builder.add("send", 1, HostLaunch(0))
    assert builder.build()[0].dependencies == (1,)


def test_empty() -> None:
    schedule = ScheduleBuilder(["cpu"]).build()
    assert len(schedule) == 0
    assert list(schedule) == []
    with pytest.raises(SpecError, match="at least one rank"):
        ScheduleBuilder([])


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"rank": 2}], "schedule.rank: got 2, expected a rank of 0..1"),
        ([{"rank": 0}, {"rank": -1}], "schedule.rank: got -1"),
        ([{"dependencies": (0,)}], "dependencies: got 0, expected other actions"),
        ([{}, {"dependencies": (0, 5)}], "dependencies: got 5, expected other actions of 0..1"),
        ([{"dependencies": (-1,)}, {}], "dependencies: got -1"),
        ([{"rendezvous": 3}, {"rendezvous": 3}], "one action of a rank in a rendezvous"),
        ([{"pressure": 1.5}], "schedule.pressure: got 1.5"),
        ([{"pressure": float("nan")}], "schedule.pressure: got nan"),
    ],
)
def test_what_cannot_be_a_schedule(rows: list[dict[str, int]], words: str) -> None:
    builder = ScheduleBuilder(["cpu", "cpu"])
    for row in rows:
        builder.add("F", row.pop("rank", 0), HostLaunch(0), **row)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=words):
        builder.build()


@given(
    st.integers(1, 3), st.integers(0, 4), st.booleans(), st.integers(0, 3),
    st.sampled_from(["decode", "other"]),
)  # fmt: skip
def test_repeated_actions_are_those_that_would_be_added(
    stages: int, copies: int, together: bool, before: int, op: str
) -> None:
    """Steps of a pipeline, whose passes wait for the step before and may meet."""

    def work(stage: int, step: int) -> Segment:
        return Segment("decode", ((Copy(1 + stage // 2 + step // 3), 1),))  # some are equal

    def grown(repeat: bool) -> Schedule:
        builder = ScheduleBuilder([f"d{k}" for k in range(stages)])
        for k in range(before):
            builder.add("F", k % stages, HostLaunch(k))

        def one(step: int) -> None:
            begin = len(builder)
            for k in range(stages):
                needs = [begin + 2 * k - 2 * stages] if step else []
                needs += [begin + 2 * k - 1] if k else []
                builder.add(
                    "decode", k, work(k, step if op == "decode" else 0), stage=k, step=step,
                    dependencies=needs, pressure=0.5,
                )  # fmt: skip
                builder.add(
                    "all_reduce", k, Copy(7), step=step, dependencies=[begin + 2 * k],
                    rendezvous=3 * step + k if together else -1,
                    memory=Memory("activations", k, 1) if k else None,
                )  # fmt: skip

        for step in range(2 if repeat else copies + 2):
            one(step)
        if repeat:
            later = [{k: work(k, 2 + c) for k in range(stages)} for c in range(copies)]
            builder.repeat(before + 2 * stages, op, later)
        assert len(builder) == before + 2 * stages * (copies + 2)
        builder.add("F", 0, HostLaunch(0), dependencies=[len(builder) - 1])
        return builder.build()

    if together:  # numbers of a step follow one another, as many as there are
        stages = 3
    made, expected = grown(repeat=True), grown(repeat=False)
    assert list(made) == list(expected)
    assert made.works == expected.works


def test_a_schedule_may_not_become_too_long_by_repetition() -> None:
    builder = ScheduleBuilder(["t4"])
    builder.add("F", 0, HostLaunch(0), stage=0)
    with pytest.raises(SpecError, match="fewer"):
        builder.repeat(0, "F", [{0: HostLaunch(0)}] * MOST_ACTIONS)
    builder.repeat(1, "F", [{0: HostLaunch(0)}])  # nothing, and as often
    assert len(builder) == 1
