from __future__ import annotations

import time
from typing import Any

import bubble_cases as cases
import pytest
import torch

from foreplan.cost_models.costs import HostLaunch
from foreplan.cost_models.schedule import Action
from foreplan.cost_models.simulator import simulate
from foreplan.errors import SpecError
from foreplan.planner.bubbles.execution.kernels import BubbleKernels
from foreplan.planner.bubbles.execution.profile import (
    Timing,
    layer_times,
    profile_step,
    with_measured_layers,
)

CPU = torch.device("cpu")


class Slowed:
    """Kernels whose actions take at least as long as they are told."""

    def __init__(self, inner: BubbleKernels, seconds: dict[str, float]) -> None:
        self._inner, self._seconds = inner, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, action: Action) -> None:
        self._inner.run(action)
        time.sleep(self._seconds.get(action.op, 0.0))


def test_every_kind_of_action_is_named_timed_and_priced() -> None:
    problem = cases.problem(2, [cases.encoder(), cases.encoder("audio", frozen=True)])
    decision = cases.decision(problem, "1f1b", ranks=2, encoder_ranks=[[[0], [1]], [[1]]], halves=2)
    schedule = cases.schedule_of(problem, decision)
    told = {"F": 0.002, "B": 0.008, "encode": 0.004}
    kernels: list[Any] = [Slowed(one, told) for one in cases.kernels_of(problem, decision)]
    profile = profile_step(schedule, decision, kernels, CPU, rounds=2)
    names = {"0F", "0B", "1F", "1B", "e0.0F", "e0.1F", "e0.0B", "e0.1B", "e1.0F", "optimizer"}
    assert set(profile.timings) == names
    assert profile.timings["0F"].count == 2 * 4
    for name, least in (("0F", 0.002), ("1B", 0.008), ("e0.1F", 0.004)):
        timing = profile.timings[name]
        assert least <= timing.low_s <= timing.median_s <= timing.high_s
    # The prices are those of the schedule's own works: what is not timed is free here.
    free = dict.fromkeys(schedule.works, 0.0)
    prices = free | dict(profile.prices) | {HostLaunch(0): 0.0}
    makespan_s = simulate(schedule, prices).makespan_s
    assert makespan_s >= 4 * 0.010 + 2 * 0.004
    assert profile.document()["timings"]["0F"]["median_s"] == profile.timings["0F"].median_s
    with pytest.raises(SpecError, match="rounds"):
        profile_step(schedule, decision, kernels, CPU, rounds=0)


def test_layer_times_become_the_workloads_own() -> None:
    problem = cases.problem(2, [cases.encoder(), cases.encoder("audio", frozen=True)])
    decision = cases.decision(problem, "1f1b", ranks=2, encoder_ranks=[[[0]], [[1]]])
    times = layer_times(problem, decision, CPU, torch.float32, rounds=2)
    assert set(times) == {"backbone", "vit", "audio"}
    assert all(forward.median_s > 0.0 for forward, _ in times.values())
    assert times["backbone"][1].median_s > 0.0 == times["audio"][1].median_s
    workload = with_measured_layers(problem.workload, times)
    assert workload.backbone is not None
    assert workload.backbone.layer_forward_s == times["backbone"][0].median_s
    dims = workload.encoders[0].dims
    assert dims is not None
    assert dims.layer_backward_s == times["vit"][1].median_s
    assert problem.workload.encoders[0].dims != dims


def test_percentiles_of_a_sample() -> None:
    timing = Timing.of([float(x) for x in range(101)])
    assert (timing.low_s, timing.median_s, timing.high_s, timing.count) == (5.0, 50.0, 95.0, 101)
