"""The schedule of a serving decision: steps of decoding that are alike, passes of equal stages."""

import numpy as np
import pytest

from foreplan.planner.serving import ServingPlanner, pipeline

PLANNER = ServingPlanner()
COLUMNS = (
    "rank", "op", "work", "stage", "microbatch", "step", "peer", "rendezvous", "resource_set",
    "pressure", "dependency_start", "dependency",
)  # fmt: skip


@pytest.mark.parametrize("fields", [
    {"new_tokens": 12},
    {"new_tokens": 12, "prefill_microbatch": 4, "decode_microbatch": 1},
    {"new_tokens": 12, "tensor_parallel": 2, "prefill_microbatch": 2, "decode_microbatch": 2},
    *({"new_tokens": count} for count in (1, 2, 3, 4, 5)),
])  # fmt: skip
@pytest.mark.parametrize("model", ["tiny-llama-random", "tiny-moe-random"])
@pytest.mark.parametrize("real", [False, True])
def test_steps_that_are_alike_are_those_made_one_by_one(
    make_problem, monkeypatch, fields, model, real
):
    isas = "native" if "tensor_parallel" in fields else "avx2 native"
    problem = make_problem(*(64.0,) * 4, model=model, isas=isas, **fields)
    decision = PLANNER.decide(problem).decision

    def made():
        return PLANNER.real(problem, decision)[0] if real else PLANNER.schedule(problem, decision)

    alike = made()
    monkeypatch.setattr(pipeline, "_UNLIKE", 1000)
    one_by_one = made()
    for name in COLUMNS:
        assert np.array_equal(getattr(alike, name), getattr(one_by_one, name)), name
    for name in ("works", "ops", "resources", "resource_sets", "devices"):
        assert getattr(alike, name) == getattr(one_by_one, name), name


def test_equal_stages_share_their_works(make_problem, monkeypatch):
    problem = make_problem(*(16.0,) * 4, isas="native", bits=[4], new_tokens=8)
    decision = PLANNER.decide(problem).decision
    asked = []
    counted = pipeline.ServingSchedule._segment

    def segment(self, phase, stage, step):
        asked.append((phase, stage.sort, step))
        return counted(self, phase, stage, step)

    monkeypatch.setattr(pipeline.ServingSchedule, "_segment", segment)
    PLANNER.schedule(problem, decision)
    assert len(asked) == len(set(asked))
    assert len({sort for _, sort, _ in asked}) <= len(decision.stages)
