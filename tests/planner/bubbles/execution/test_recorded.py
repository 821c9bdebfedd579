"""Recorded passes compute what the same passes compute one operator at a time."""

from __future__ import annotations

from typing import Any

import bubble_cases as cases
import pytest
import torch
from logged_graphs import LoggedGraphs

from foreplan.planner.bubbles.execution.entry import compare_steps, rank_kernels, reference_step
from foreplan.planner.bubbles.execution.one_process import OneProcess
from foreplan.planner.verify.partners import COLLECTIVES

VIT, AUDIO = cases.encoder(), cases.encoder("audio", frozen=True)
#: Schedule, fields of the workload, encoders, ranks of their pipelines.
STEPS: dict[str, tuple[str, dict[str, Any], list[Any], list[Any]]] = {
    "1f1b": ("1f1b", {}, [VIT], [[[0], [1]]]),
    "computed again": ("1f1b", {"recompute": "full"}, [VIT], [[[0, 1]]]),
    "weights put off": ("zb-h1", {}, [VIT], [[[0], [1]]]),
    "two encoders, one frozen": ("gpipe", {}, [VIT, AUDIO], [[[1]], [[0]]]),
}


def made(name: str, ranks: int = 2) -> tuple[Any, Any, list[Any]]:
    schedule, fields, encoders, rows = STEPS[name]
    problem = cases.problem(ranks, encoders, **fields)
    decision = cases.decision(problem, schedule, ranks=ranks, encoder_ranks=rows)
    kernels = cases.kernels_of(problem, decision)
    for one in kernels:
        one.record(LoggedGraphs())
    return problem, decision, kernels


@pytest.mark.parametrize("name", STEPS)
def test_replayed_steps_equal_one_process(name: str) -> None:
    problem, decision, kernels = made(name)
    process = OneProcess(cases.schedule_of(problem, decision), kernels)
    reference = reference_step(problem, decision, mode="reference")
    for _ in range(2):  # the second step finds what the first one left
        for one in kernels:
            one.reset()
        process.step()
        agreed = compare_steps(process.result(), reference)
        assert agreed.passed, agreed.details
        assert agreed.details["losses"] == decision.microbatches
    assert all(one.live == 0 for one in kernels)


def test_a_replay_reads_the_weights_of_its_step() -> None:
    problem = cases.problem(1, [VIT])
    decision = cases.decision(problem, "gpipe", ranks=1, encoder_ranks=[[[0]]])
    actions = [a for a in cases.schedule_of(problem, decision) if a.op not in COLLECTIVES]
    losses: list[list[float]] = []
    for recorded in (False, True):
        (kernels,) = cases.kernels_of(problem, decision)
        if recorded:
            kernels.record(LoggedGraphs())
        losses.append([])
        for _ in range(3):
            kernels.advance()
            for action in actions:
                kernels.run(action)
            losses[-1].append(sum(kernels.losses().values()))
    assert losses[0] == losses[1]
    assert losses[0][0] > losses[0][1] > losses[0][2]


class Counting(LoggedGraphs):
    """Says how many passes were recorded."""

    count = 0

    def record(self, body: Any) -> Any:
        self.count += 1
        return super().record(body)


def test_another_order_is_recorded_anew_and_goes_on_from_the_weights() -> None:
    problem = cases.problem(1, [VIT])
    orders = [
        cases.decision(problem, "gpipe", ranks=1, encoder_ranks=[[[0]]], fill=fill)
        for fill in ("fine", "three-phase")
    ]
    losses: list[list[float]] = []
    for graphs in (None, Counting()):
        (kernels,) = cases.kernels_of(problem, orders[0])
        if graphs is not None:
            kernels.record(graphs)
        losses.append([])
        for order in (orders[0], orders[1], orders[1]):
            if order != orders[0]:
                kernels.adopt(order)
            actions = [a for a in cases.schedule_of(problem, order) if a.op not in COLLECTIVES]
            kernels.advance()
            for action in actions:
                kernels.run(action)
            losses[-1].append(sum(kernels.losses().values()))
        if graphs is not None:  # all but the optimizer, three times
            assert graphs.count == 3 * (len(actions) - 1)
    assert losses[0] == losses[1]
    assert losses[0][0] > losses[0][1] > losses[0][2]


def test_another_order_is_recorded_with_its_own_data_and_messages() -> None:
    problem = cases.problem(2, [VIT])
    orders = [
        cases.decision(problem, "1f1b", ranks=2, encoder_ranks=[[[0], [1]]], turn=turn)
        for turn in range(2)
    ]
    kernels = cases.kernels_of(problem, orders[0])
    for one in kernels:
        one.record(LoggedGraphs())
    for order in (orders[0], orders[1], orders[0]):
        for one in kernels:
            one.adopt(order)
        process = OneProcess(cases.schedule_of(problem, order), kernels)
        for _ in range(2):
            process.step()
            agreed = compare_steps(
                process.result(), reference_step(problem, order, mode="reference")
            )
            assert agreed.passed, agreed.details


def test_what_cannot_be_recorded_raises_and_leaves_a_rank_as_it_was() -> None:
    class Refusing(LoggedGraphs):
        def record(self, body: Any) -> Any:
            body()
            raise RuntimeError("operation not permitted when stream is capturing")

    problem = cases.problem(1, [VIT])
    decision = cases.decision(problem, "gpipe", ranks=1, encoder_ranks=[[[0]]])
    kernels = rank_kernels(problem, decision, 0, mode="reference")
    with pytest.raises(RuntimeError, match="capturing"):
        kernels.record(Refusing())
    kernels.reset()
    process = OneProcess(cases.schedule_of(problem, decision), [kernels])
    process.step()
    agreed = compare_steps(process.result(), reference_step(problem, decision, mode="reference"))
    assert agreed.passed, agreed.details


def test_sends_carry_the_same_memory_in_every_step() -> None:
    problem, decision, kernels = made("1f1b")
    process = OneProcess(cases.schedule_of(problem, decision), kernels)
    sends = [a for a in cases.schedule_of(problem, decision) if a.op == "send"]
    found = []
    for _ in range(2):
        for one in kernels:
            one.reset()
        process.step()
        found.append([kernels[a.rank].payload(a).data_ptr() for a in sends])
    assert found[0] == found[1]
    assert len(set(found[0])) == len(sends)  # none is written over while another is on its way
    assert torch.isfinite(kernels[0].payload(sends[0])).all()
