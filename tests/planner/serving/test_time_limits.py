"""Limits on first tokens and on tokens: met when simulated, proven impossible, or refused."""

import dataclasses

import pytest

from foreplan.errors import InfeasibleError, SpecError
from foreplan.planner.predict import Forecast
from foreplan.planner.serving import ServingPlanner

PLANNER = ServingPlanner()
ROOMY = (256.0, 256.0)


def forecast(problem):
    return Forecast(PLANNER, problem, PLANNER.decide(problem).decision)


@pytest.mark.parametrize("field", ["time_to_first_token_s", "time_per_output_token_s"])
def test_a_limit_is_met_or_impossible(make_problem, field):
    free = forecast(make_problem(*ROOMY))
    for share in (1.001, 0.98, 0.9, 0.8, 0.6, 0.3, 0.05):
        limit = share * free.metrics[field]
        problem = make_problem(*ROOMY, **{f"max_{field}": limit})
        try:
            limited = forecast(problem)
        except InfeasibleError:
            # Below what the unlimited plan has.
            assert share < 1
            continue
        assert limited.metrics[field] <= limit * (1 + 1e-9)
        assert limited.total_s >= free.total_s * (1 - 1e-4)


def test_an_impossible_limit_names_the_least(make_problem):
    with pytest.raises(InfeasibleError, match=r"sooner than .* max_time_to_first_token_s of"):
        PLANNER.decide(make_problem(*ROOMY, max_time_to_first_token_s=1e-9))


def test_a_limit_of_nothing_is_refused(make_problem):
    with pytest.raises(SpecError):
        make_problem(*ROOMY, max_time_per_output_token_s=0)


def test_concurrent_requests_are_the_least_of_the_stages_and_fit(make_problem):
    problem = make_problem(24, 64)
    decision = PLANNER.decide(problem).decision
    most = PLANNER.metrics(problem, decision, Forecast(PLANNER, problem, decision).timeline)[
        "concurrent_requests"
    ]
    assert most >= problem.workload.batch
    w = problem.workload.model_copy(
        update={"batch": int(most) // decision.decode_microbatch * decision.decode_microbatch}
    )
    for ledger in PLANNER.memory(dataclasses.replace(problem, workload=w), decision):
        assert ledger.free_bytes >= 0
