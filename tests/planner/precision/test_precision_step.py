"""The all-reduce of a bucket runs beside the rest of the backward pass, priced and carried out."""

from __future__ import annotations

import pytest

from foreplan.cost_models.costs import HostLaunch
from foreplan.planner.precision.spec import ALL_REDUCE, BACKWARD, OPTIMIZER
from foreplan.planner.precision.step import Buckets, WorkerStep, step_schedule
from foreplan.planner.verify.rank_program import rank_programs


@pytest.mark.parametrize("steps", [1, 3])
def test_backward_pass_goes_on_while_gradients_are_reduced(steps: int) -> None:
    nothing = HostLaunch(0)
    workers = [
        WorkerStep(name, nothing, (nothing,) * 3, nothing, saved_bytes=(0, 0, 0)) for name in "ab"
    ]
    buckets = Buckets((("a",), ("b",), ("c",)), (4, 4, 4), (2, 1, 0))
    for program in rank_programs(step_schedule(workers, buckets, steps)):
        reduces = {
            place for place, step in enumerate(program.steps) if step.action.op == ALL_REDUCE
        }
        assert len(reduces) == 3 * steps
        for step in program.steps:
            waits = reduces.intersection(step.waits)
            if step.action.op == BACKWARD:
                assert not waits, f"{step.action.label} waits for an all-reduce"
            if step.action.op == OPTIMIZER:
                assert len(waits) == 3
