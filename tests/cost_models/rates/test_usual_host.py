"""What a usual host takes to issue the actions of a schedule, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.cost_models.costs import Collective, HostLaunch, Segment, Work
from foreplan.cost_models.rates.gpu_host import HIGH, LOW, SECONDS
from foreplan.cost_models.rates.usual_host import usual_host_s
from foreplan.cost_models.schedule import Schedule
from foreplan.cost_models.schedule_builder import ScheduleBuilder
from foreplan.datasets.kernels.training_programs import (
    BACKWARD,
    FORWARD,
    cast_program,
    linear_program,
    optimizer_program,
)

LINEAR = linear_program(FORWARD, 64, 32, 16, "fp32/fp32/torch.linear")
GRADIENTS = linear_program(BACKWARD, 64, 32, 16, "fp32/fp32/torch.linear")
CAST = cast_program(512, 16, "fp32", "bf16")
UPDATE = optimizer_program("adamw", 1000, 7)


def scheduled(*works: Work, rank: int = 0) -> Schedule:
    builder = ScheduleBuilder(["h200", "h200"])
    for work in works:
        builder.add("work", rank, work)
    return builder.build()


def once(calls: int) -> float:
    return calls**2 / (calls**2 + 25**2)


def test_a_step_by_hand() -> None:
    forward = Segment("F", ((LINEAR, 3), (CAST, 2), (HostLaunch(1), 2)))
    backward = Segment("B", ((GRADIENTS, 3), (CAST, 1)))
    found = usual_host_s(scheduled(forward, backward, UPDATE))
    f, b, u = SECONDS["forward"], SECONDS["backward"], SECONDS["optimizer"]
    seconds = (
        7 * f.call_s + once(7) * f.once_s
        + 4 * b.call_s + 3 * b.tensor_s + once(4 + 3) * b.once_s
        + 7 * u.tensor_s + once(7) * u.once_s
    )  # fmt: skip
    np.testing.assert_allclose(found[0], seconds * np.array([1.0, LOW, HIGH]))
    np.testing.assert_array_equal(found[1], 0.0)


def test_each_action_of_each_rank_counts() -> None:
    alone = usual_host_s(scheduled(LINEAR, rank=1))
    assert usual_host_s(scheduled(*[LINEAR] * 5, rank=1)) == pytest.approx(5 * alone)
    assert alone[0, 0] == 0.0 < alone[1, 0]


def test_what_no_operator_stands_for_takes_the_host_nothing() -> None:
    found = usual_host_s(scheduled(Collective("all_reduce", 8, (0, 1), "fp32"), HostLaunch(0)))
    assert not found.any()
