"""A step comes to its end on GPUs, whose streams do one thing after the other."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import bubble_cases as cases
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_queues import SUMS, stuck

from foreplan.planner.verify.rank_program import RankProgram, rank_programs


def programs_of(microbatches: int, lanes: int, **options: Any) -> tuple[RankProgram, ...]:
    """Two ranks of the pipeline, each of which encodes every other micro-batch."""
    problem = cases.problem(2 * lanes, [cases.encoder()], microbatches=microbatches)
    decision = cases.decision(
        problem, "1f1b", ranks=2, encoder_ranks=[[[0], [1]]], tp=lanes, **options
    )
    return rank_programs(cases.schedule_of(problem, decision), ordered=True)


@settings(max_examples=40, deadline=None)
@given(
    microbatches=st.sampled_from([2, 4, 6]), lanes=st.sampled_from([1, 2]),
    shuffle=st.none() | st.integers(0, 99), pieces=st.none() | st.integers(0, 99),
    fill=st.sampled_from(["fine", "three-phase"]),
)  # fmt: skip
def test_any_step_ends_where_each_connection_has_a_stream(
    microbatches: int, lanes: int, shuffle: int | None, pieces: int | None, fill: str
) -> None:
    programs = programs_of(
        microbatches, lanes, shuffle=shuffle, fill=fill, pieces=pieces if lanes > 1 else None
    )
    assert not stuck(programs, lanes)
    for first in range(0, len(programs), lanes):  # lanes sum in the same order
        lists = {
            tuple((s.kind, s.action.label, s.waits) for s in program.steps)
            for program in programs[first : first + lanes]
        }
        assert len(lists) == 1


def test_a_receive_on_the_stream_of_the_sums_holds_up_the_step() -> None:
    """What a run on four GPUs did when torch gave two users the same stream."""
    programs = programs_of(4, 2, pieces=1)

    def shared(rank: int, stream: Hashable) -> Hashable:
        return SUMS if (rank, stream) == (2, ("pair", (0, 2))) else stream

    found = stuck(programs, 2, shared)
    assert (2, SUMS) in found
    assert {rank for rank, _ in found} == {0, 1, 2, 3}
