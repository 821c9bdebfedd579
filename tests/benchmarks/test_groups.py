"""How long it takes to plan with tensor parallelism: pricing apart, the search over groupings."""

import pytest

from foreplan.cost_models.book import Profiles, cost_book
from foreplan.planner.base import Problem
from foreplan.planner.serving import ServingPlanner
from foreplan.planner.serving.cases import solve_cases
from foreplan.planner.serving.llm_pq_clusters import BATCH, CLUSTERS, cluster_of, model_of
from foreplan.planner.serving.spec import ServingWorkload
from foreplan.planner.serving.time_limits import time_limits

GAP = 1e-4


@pytest.mark.parametrize("degree", [1, "auto"])
@pytest.mark.parametrize("number", [3, 6, 10])
def test_groupings_of_a_cluster(benchmark, number, degree):
    """LLM-PQ's clusters at 8 bits or more; the proof is part of the time."""
    name, devices = CLUSTERS[number]
    cluster = cluster_of(devices)
    workload = ServingWorkload(
        batch=BATCH, prompt_tokens=512, new_tokens=100, min_average_bits=8, tensor_parallel=degree
    )
    problem = Problem(model_of(name), cluster, workload, cost_book(cluster, Profiles(), "roofline"))
    chains = ServingPlanner()._chains(problem)
    for sizes in chains.sizes():
        chains.problem(sizes)
    found = benchmark.pedantic(
        solve_cases, (chains, time_limits(workload)), {"gap": GAP, "within": 0.02}, rounds=1
    )
    assert found.proven
    assert found.lower_s >= found.best_s * (1 - 1.01 * GAP)
