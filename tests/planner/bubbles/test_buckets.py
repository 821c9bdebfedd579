"""How many collectives the parameters of an encoder's stage are exchanged in."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.planner.bubbles.problems import problem, workload

from foreplan.cost_models.simulator import simulate
from foreplan.planner.bubbles.backbone import BackboneTimeline
from foreplan.planner.bubbles.filling import Filling, fill
from foreplan.planner.bubbles.placement import BUCKETS
from foreplan.planner.bubbles.schedule import StepSchedule
from foreplan.planner.bubbles.training_step import TrainingStep

#: Of one link: an empty collective of two ranks takes the latency, bytes half of their transfer.
LATENCY_S, BYTES_PER_S = 1e-5, 1e11


def step_of(latency_s: float = LATENCY_S, **stated: float | None) -> TrainingStep:
    """A step of two ranks whose exchange is priced by a link, unless its time is stated."""
    asked = workload(pp=2, microbatches=4)
    times = {"encoder_all_gather_s": None, "encoder_reduce_scatter_s": None} | stated
    asked = asked.model_copy(update={"times": asked.times.model_copy(update=times)})
    made = problem(asked)
    link = {"latency_s": latency_s, "bandwidth_bytes_per_s": BYTES_PER_S, "collectives": ()}
    tiers = tuple(tier.model_copy(update=link) for tier in made.cluster.tiers)
    cluster = made.cluster.model_copy(update={"tiers": tiers})
    return TrainingStep(dataclasses.replace(made, cluster=cluster), asked.plan)


STEP = step_of()
GROUP = STEP.replica_group((0, 1))


@given(parameters=st.integers(1, 10**9), more=st.integers(0, 10**9))
def test_a_bucket_is_worth_its_collective(parameters: int, more: int) -> None:
    count = STEP.bucket_count(parameters, GROUP)
    assert 1 <= count <= STEP.bucket_count(parameters + more, GROUP) <= BUCKETS
    bytes_s = parameters * STEP.arithmetic.element_bytes / 2 / BYTES_PER_S
    assert count == 1 or bytes_s / count >= 4 * LATENCY_S
    assert count == BUCKETS or bytes_s / (count + 1) < 4 * LATENCY_S


def test_no_latency_is_no_reason_for_few() -> None:
    assert step_of(latency_s=0.0).bucket_count(1, GROUP) == BUCKETS


def test_a_stated_time_is_that_of_the_whole_stage() -> None:
    stated_s = 0.5
    step = step_of(encoder_all_gather_s=stated_s, encoder_reduce_scatter_s=0.0)
    assert step.bucket_count(10**9, GROUP) == 1
    asked = step.workload
    costs = problem(asked).costs
    backbone = BackboneTimeline.of(step, costs, asked.schedule, asked.microbatches)
    schedule = StepSchedule(step, fill(Filling(backbone, 1, 0.5)).decision).build()
    np.testing.assert_allclose(simulate(schedule, costs).total_s("all_gather"), stated_s)


@pytest.mark.parametrize(("width", "count"), [(64, 1), (4096, BUCKETS)])
def test_small_encoders_exchange_at_once(width: int, count: int) -> None:
    """On the links of a board of H200s, as the zoo has them."""
    asked = workload(pp=2, microbatches=4)
    times = {"encoder_all_gather_s": None, "encoder_reduce_scatter_s": None}
    asked = asked.model_copy(update={"times": asked.times.model_copy(update=times)})
    step = TrainingStep(problem(asked), asked.plan)
    assert step.bucket_count(4 * 12 * width * width, GROUP) == count
