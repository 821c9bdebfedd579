from __future__ import annotations

import pytest

from foreplan.cost_models.costs import Copy, HostLaunch, Segment
from foreplan.cost_models.schedule import Action, Memory, ScheduleBuilder
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
