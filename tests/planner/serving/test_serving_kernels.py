"""Recorded passes of a stage: one record a pass, results that stay, the tokens of plain passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from foreplan.planner.serving import ServingPlanner, kernels
from foreplan.planner.serving.kernels import ServingKernels, compare_tokens, walk

PLANNER = ServingPlanner()


class Tape:
    """Stands in for CUDA graphs: replaying calls what was recorded, on the same tensors."""

    def __init__(self) -> None:
        self.warmed = self.recorded = self.replayed = 0

    def warm_up(self, body: Callable[[], None]) -> None:
        self.warmed += 1
        body()

    def record(self, body: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            body()

        return replay


def run(problem, decision, stages):
    """What the second of two runs in one process reports."""
    schedule = PLANNER.schedule(problem, decision)
    for _ in range(2):
        for stage in stages:
            stage.reset()
        result = walk(schedule, decision, stages)
    return result


def stages_of(problem, decision, mode, recorders):
    return [
        ServingKernels(problem.model, problem.workload, decision, rank, mode, 0, recorder)
        for rank, recorder in zip(range(len(decision.stages)), recorders, strict=True)
    ]


@pytest.mark.parametrize("mode", ["fast", "forced"])
@pytest.mark.parametrize("memory", [(256.0, 256.0), (256.0,)])
def test_recorded_passes_compute_what_plain_ones_do(make_problem, mode, memory):
    problem = make_problem(
        *memory, prefill_microbatch=2, decode_microbatch=1, new_tokens=4, bits=[16], isas="native"
    )
    decision = PLANNER.decide(problem).decision
    plain = run(problem, decision, stages_of(problem, decision, mode, [None] * len(memory)))
    tapes = [Tape() for _ in decision.stages]
    recorded = run(problem, decision, stages_of(problem, decision, mode, tapes))
    assert compare_tokens(recorded, plain, mode).exact
    assert recorded == plain
    passes = 2 + 3 * 4  # prefill micro-batches, then decode steps of every micro-batch
    assert [(t.warmed, t.recorded, t.replayed) for t in tapes] == [(3, passes, 2 * passes)] * len(
        tapes
    )


def test_passes_beyond_the_limit_run_plainly(make_problem, monkeypatch):
    problem = make_problem(256.0, prefill_microbatch=4, decode_microbatch=4, bits=[16])
    decision = PLANNER.decide(problem).decision
    plain = run(problem, decision, stages_of(problem, decision, "fast", [None]))
    monkeypatch.setattr(kernels, "MOST_RECORDED_LAYERS", 5 * problem.model.layers)
    tape = Tape()
    assert run(problem, decision, stages_of(problem, decision, "fast", [tape])) == plain
    assert (tape.recorded, tape.replayed) == (5, 10)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["fast", "forced"])
def test_graphs_compute_what_plain_passes_do(make_problem, mode, monkeypatch):
    problem = make_problem(256.0, prefill_microbatch=2, decode_microbatch=1)
    decision = PLANNER.decide(problem).decision
    linear = dict.fromkeys(decision.stages[0].kernels, "int4/bf16/foreplan.fragment_linear") | {
        k: "bf16/bf16/torch.sdpa" for k in decision.stages[0].kernels if "attention" in k
    }
    linear |= {k: "bf16/bf16/torch.linear" for k in linear if "head" in k}
    stage = decision.stages[0].model_copy(update={"device": "localhost/cuda:0", "kernels": linear})
    # The schedule is of the problem's processor: what it orders is the same.
    placed = decision.model_copy(update={"stages": (stage,)})
    graphs = run(problem, decision, stages_of(problem, placed, mode, [None]))
    monkeypatch.setattr(kernels, "MOST_RECORDED_LAYERS", 0)
    plain = run(problem, decision, stages_of(problem, placed, mode, [None]))
    assert graphs == plain
