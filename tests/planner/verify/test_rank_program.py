from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.cost_models.costs import HostLaunch
from foreplan.cost_models.pipeline import SCHEDULES, pipeline_schedule
from foreplan.cost_models.schedule import COMPUTE, Schedule
from foreplan.cost_models.schedule_builder import ScheduleBuilder
from foreplan.errors import SpecError
from foreplan.planner.verify.rank_program import RankProgram, rank_programs

FREE = HostLaunch(0)


def labels(program: RankProgram) -> list[str]:
    return [step.action.label for step in program.steps]


def relay(steps: int = 2) -> Schedule:
    """Rank 0 computes and sends, rank 1 receives late in its list."""
    builder = ScheduleBuilder(["a", "b"])
    for batch in range(steps):
        done = builder.add("F", 0, FREE, stage=0, microbatch=batch)
        sent = builder.add(
            "send", 0, FREE, stage=1, microbatch=batch, peer=1, dependencies=(done,), resources=()
        )
        got = builder.add(
            "recv", 1, FREE, stage=1, microbatch=batch, peer=0, dependencies=(sent,), resources=()
        )
        builder.add("F", 1, FREE, stage=1, microbatch=batch, dependencies=(got,))
    return builder.build()


def test_receives_are_posted_before_the_compute_they_overlap() -> None:
    first, second = rank_programs(relay())
    assert labels(first) == ["0F0", "1send0", "0F1", "1send1"]
    assert labels(second) == ["1recv0", "1recv1", "1F0", "1F1"]
    assert [step.waits for step in second.steps] == [(), (), (0,), (1,)]
    assert first.pending == (1, 3)
    assert [step.tag for step in first.steps if step.kind == "send"] == [1, 5]
    assert [step.tag for step in second.steps if step.kind == "recv"] == [1, 5]


def test_a_receive_stays_behind_the_last_reader_of_its_buffer() -> None:
    builder = ScheduleBuilder(["a", "b"])
    for step in range(2):
        sent = builder.add("send", 0, FREE, stage=1, microbatch=0, step=step, peer=1, resources=())
        got = builder.add(
            "recv", 1, FREE, stage=1, microbatch=0, step=step, peer=0, dependencies=(sent,),
            resources=(),
        )  # fmt: skip
        builder.add("F", 1, FREE, stage=1, microbatch=0, step=step, dependencies=(got,))
        builder.add("other", 1, FREE, stage=7, microbatch=0, step=step)
    _, second = rank_programs(builder.build())
    assert labels(second) == ["1recv0.0", "1F0.0", "1recv0.1", "7other0.0", "1F0.1", "7other0.1"]


def test_a_run_waits_for_the_send_of_the_former_result() -> None:
    builder = ScheduleBuilder(["a", "b"])
    first = builder.add("F", 0, FREE, stage=0, microbatch=0)
    sent = builder.add(
        "send", 0, FREE, stage=1, microbatch=0, peer=1, dependencies=(first,), resources=()
    )
    builder.add("F", 0, FREE, stage=0, microbatch=1)
    builder.add("F", 0, FREE, stage=0, microbatch=0)
    builder.add("recv", 1, FREE, peer=0, dependencies=(sent,))
    program = rank_programs(builder.build())[0]
    assert [step.waits for step in program.steps] == [(), (), (), (1,)]


def test_transfers_on_compute_block() -> None:
    builder = ScheduleBuilder(["a", "b"])
    sent = builder.add("send", 0, FREE, peer=1)
    builder.add("recv", 1, FREE, peer=0, dependencies=(sent,))
    assert all(step.blocking for p in rank_programs(builder.build()) for step in p.steps)


def test_dependencies_may_be_listed_later() -> None:
    builder = ScheduleBuilder(["a", "b"])
    sent = builder.add("send", 0, FREE, peer=1, dependencies=(1,), resources=())
    builder.add("F", 0, FREE)
    builder.add("recv", 1, FREE, peer=0, dependencies=(sent,))
    assert labels(rank_programs(builder.build())[0]) == ["F", "send"]


def gathers(count: int) -> Schedule:
    """Two ranks gather parameters and compute with each as soon as they are there."""
    builder = ScheduleBuilder(["a", "b"])
    for rank in (0, 1):
        got = [
            builder.add("all_gather", rank, FREE, step=k, resources=("dp",), rendezvous=k)
            for k in range(count)
        ]
        for k, index in enumerate(got):
            builder.add("encode", rank, FREE, stage=0, microbatch=0, step=k, dependencies=(index,))
    return builder.build()


def test_a_queue_takes_gathers_one_ahead_of_what_needs_them() -> None:
    steps = [
        [(step.action.op[0], step.action.step) for step in program.steps]
        for program in rank_programs(gathers(4), ordered=True)
    ]
    assert steps[0] == steps[1] == [
        ("a", 0), ("a", 1), ("e", 0), ("a", 2), ("e", 1), ("a", 3), ("e", 2), ("e", 3),
    ]  # fmt: skip
    first = rank_programs(gathers(4), ordered=True)[0]
    assert all(step.independent == (step.kind == "collective") for step in first.steps)
    for place, step in enumerate(first.steps):
        if step.kind == "run":
            assert [first.steps[k].action.step for k in step.waits] == [step.action.step]
        assert all(k < place for k in step.waits)


def test_without_a_queue_gathers_start_at_once() -> None:
    first = rank_programs(gathers(3))[0]
    assert [step.kind for step in first.steps] == ["collective"] * 3 + ["run"] * 3


def test_a_reduction_depends_on_what_its_rank_computes() -> None:
    builder = ScheduleBuilder(["a", "b"])
    for rank in (0, 1):
        done = builder.add("B", rank, FREE, stage=rank, microbatch=0)
        builder.add(
            "reduce_scatter", rank, FREE, dependencies=(done,), resources=("dp",), rendezvous=0
        )
    for program in rank_programs(builder.build(), ordered=True):
        assert [step.independent for step in program.steps] == [False, False]


def test_the_same_stage_may_receive_forward_and_backward() -> None:
    schedule = pipeline_schedule("interleaved-1f1b", stages=2, microbatches=2, chunks=2)
    for program in rank_programs(schedule, ordered=True):
        for step in program.steps:
            if step.kind == "recv":
                assert schedule[step.tag].op == "send"
                assert step.tag in step.action.dependencies


@given(
    name=st.sampled_from(SCHEDULES), stages=st.integers(1, 5), groups=st.integers(1, 4),
    ordered=st.booleans(),
)  # fmt: skip
def test_every_pipeline_order_comes_to_its_end(
    name: str, stages: int, groups: int, ordered: bool
) -> None:
    chunks = 2 if name == "interleaved-1f1b" else 1
    schedule = pipeline_schedule(name, stages=stages, microbatches=stages * groups, chunks=chunks)
    for rank, program in enumerate(rank_programs(schedule, ordered=ordered)):
        assert sorted(step.index for step in program.steps) == schedule.of_rank(rank)
        at = {step.index: k for k, step in enumerate(program.steps)}
        waited = {k for step in program.steps for k in step.waits} | set(program.pending)
        for k, step in enumerate(program.steps):
            assert all(at[d] < k for d in step.action.dependencies if d in at)
            assert step.kind == "run" or k in waited
        passes = [i for i in at if schedule[i].op in ("F", "B", "W", "BW")]
        assert passes == sorted(passes)


def test_what_cannot_be_run_is_named() -> None:
    def build(*actions: dict[str, object]) -> Schedule:
        builder = ScheduleBuilder(["a", "b"])
        for action in actions:
            builder.add(action.pop("op"), action.pop("rank"), FREE, **action)  # type: ignore[arg-type]
        return builder.build()

    with pytest.raises(SpecError, match="send of rank 0 with peer 1', expected one recv"):
        rank_programs(build({"op": "send", "rank": 0, "peer": 1}))
    with pytest.raises(SpecError, match="recv of rank 1 with peer 0', expected one send"):
        rank_programs(build({"op": "recv", "rank": 1, "peer": 0}))
    with pytest.raises(SpecError, match="F of rank 1 after F of rank 0"):
        rank_programs(build({"op": "F", "rank": 0}, {"op": "F", "rank": 1, "dependencies": (0,)}))
    with pytest.raises(SpecError, match="without a rendezvous"):
        rank_programs(build({"op": "all_reduce", "rank": 0}))
    with pytest.raises(SpecError, match="waits for itself"):
        rank_programs(build({"op": "F", "rank": 0, "dependencies": (1,)}, {"op": "G", "rank": 0}))


def test_a_deadlock_between_ranks_is_named() -> None:
    builder = ScheduleBuilder(["a", "b"])
    for rank in (0, 1):
        builder.add("send", rank, FREE, peer=1 - rank, microbatch=rank)
    for rank in (0, 1):
        builder.add("recv", rank, FREE, peer=1 - rank, microbatch=1 - rank)
    with pytest.raises(SpecError, match="rank 0 at send0 waits for recv0 of rank 1, rank 1 at"):
        rank_programs(builder.build())


def test_collectives_of_a_group_keep_one_order() -> None:
    builder = ScheduleBuilder(["a", "b"])
    for rank, order in ((0, (0, 1)), (1, (1, 0))):
        for number in order:
            builder.add(
                "all_reduce", rank, FREE, microbatch=number, rendezvous=number, resources=()
            )
    programs = rank_programs(builder.build())
    assert labels(programs[0]) == labels(programs[1]) == ["all_reduce0", "all_reduce1"]
    assert programs[0].pending == (0, 1)


def test_a_collective_hides_behind_runs_that_name_no_stage() -> None:
    builder = ScheduleBuilder(["a", "b"])
    for rank in (0, 1):
        done = builder.add("step", rank, FREE)
        builder.add(
            "all_reduce", rank, FREE, dependencies=(done,), rendezvous=0, resources=("link",)
        )
        builder.add("step", rank, FREE)
    for program in rank_programs(builder.build()):
        assert [step.waits for step in program.steps] == [(), (), ()]
        assert program.pending == (1,)


def test_a_sum_is_waited_for_where_nothing_is_computed_beside_it() -> None:
    builder = ScheduleBuilder(["a", "b"])
    for rank in (0, 1):
        first = builder.add("work", rank, FREE, resources=(COMPUTE,))
        near = builder.add(
            "all_reduce", rank, FREE, dependencies=(first,), resources=("wire",), rendezvous=0
        )
        second = builder.add("work", rank, FREE, dependencies=(near,), resources=(COMPUTE,))
        far = builder.add(
            "all_reduce", rank, FREE, dependencies=(second,), resources=("wire",), rendezvous=1
        )
        builder.add("other", rank, FREE, resources=(COMPUTE,))
        builder.add("work", rank, FREE, dependencies=(far,), resources=(COMPUTE,))
        builder.add("all_reduce", rank, FREE, resources=(COMPUTE,), rendezvous=2)
    for program in rank_programs(builder.build()):
        sums = [k for k, step in enumerate(program.steps) if step.kind == "collective"]
        assert [program.waits_for(place) for place in sums] == [True, False, True]
