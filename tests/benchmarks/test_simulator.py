"""Speed of the simulator in actions per second; reported, never asserted.

``make bench`` prints the table; ``extra_info`` of the JSON (``--benchmark-json``) holds the rates.
``simulate`` includes the simulator's preparation (queues, edges) and pricing; building the schedule
in Python is measured apart.
"""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from foreplan.cost_models.pipeline import given_costs, pipeline_schedule
from foreplan.cost_models.schedule import Schedule
from foreplan.cost_models.simulator import Contention, Simulator, durations, simulate

STAGES = 16
COSTS = given_costs(18.5e-3, 18.1e-3, 9.3e-3, 0.6e-3)


@pytest.fixture(scope="module")
def build(request: pytest.FixtureRequest) -> Callable[[], Schedule]:
    """Makes 221,184 actions; few in a test run, which only has to show that this file works."""
    microbatches = 2048 if request.config.getoption("--benchmark-enable") else 32
    return lambda: pipeline_schedule("zb-h1", stages=STAGES, microbatches=microbatches)


@pytest.fixture(scope="module")
def large(build: Callable[[], Schedule]) -> Schedule:
    return build()


@pytest.fixture(scope="module")
def contended(large: Schedule) -> Schedule:
    """The same, with transfers through one shared link and passes that contend for memory."""
    names = (*large.resources, "shared:link")
    sets = (*large.resource_sets, (len(names) - 1,))
    send, backward = large.ops.index("send"), large.ops.index("B")
    return dataclasses.replace(
        large,
        resources=names,
        resource_sets=sets,
        resource_set=np.where(large.op == send, len(sets) - 1, large.resource_set),
        pressure=np.where(large.op == backward, 0.5, 0.0),
    )


def report(benchmark: Any, actions: int, call: Callable[[], Any]) -> None:
    """Rate and memory of a benchmark that has run."""
    if not benchmark.stats:
        return
    benchmark.extra_info["actions"] = actions
    benchmark.extra_info["actions_per_s"] = round(actions / benchmark.stats.stats.median)
    tracemalloc.start()
    kept = call()
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept is not None
    benchmark.extra_info["held_bytes_per_action"] = round(held / actions)
    benchmark.extra_info["peak_bytes_per_action"] = round(peak / actions)


def test_build(benchmark: Any, build: Callable[[], Schedule]) -> None:
    schedule = benchmark.pedantic(build, rounds=3)
    report(benchmark, len(schedule), build)


def test_simulate_dag(benchmark: Any, large: Schedule) -> None:
    benchmark.pedantic(simulate, (large, COSTS), rounds=10, warmup_rounds=1)
    report(benchmark, len(large), lambda: simulate(large, COSTS))


def test_simulate_events(benchmark: Any, contended: Schedule) -> None:
    options = {"contention": Contention((0,) * STAGES, (1.0, 1.2, 1.5)),
               "capacities": {"shared:link": 4}}  # fmt: skip
    benchmark.pedantic(simulate, (contended, COSTS), options, rounds=10, warmup_rounds=1)
    report(benchmark, len(contended), lambda: simulate(contended, COSTS, **options))


def test_run_again(benchmark: Any, large: Schedule) -> None:
    """One more run of a prepared simulator, as in resampling costs."""
    simulator, seconds = Simulator(large), durations(large, COSTS)
    benchmark.pedantic(simulator.run, (seconds,), rounds=10, warmup_rounds=1)
    report(benchmark, len(large), lambda: simulator.run(seconds))


def test_build_and_simulate(benchmark: Any, build: Callable[[], Schedule]) -> None:
    benchmark.pedantic(lambda: simulate(build(), COSTS), rounds=3, warmup_rounds=1)
    report(benchmark, len(build()), lambda: simulate(build(), COSTS))
