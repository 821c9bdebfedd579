"""Limits on first tokens and on tokens: met when simulated, proven impossible, or refused."""

import contextlib
import dataclasses
import re

import pytest

import foreplan
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
    for share in (1.0, 0.98, 0.9, 0.8, 0.6, 0.3, 0.05):
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


@pytest.mark.parametrize("field", ["max_time_to_first_token_s", "max_time_per_output_token_s"])
def test_the_least_that_is_named_will_do(make_problem, field):
    with pytest.raises(InfeasibleError) as refused:
        PLANNER.decide(make_problem(*ROOMY, **{field: 1e-9}))
    named = re.search(rf"{field} of (\S+) or more", str(refused.value))
    assert named is not None
    forecast(make_problem(*ROOMY, **{field: float(named[1])}))


@pytest.mark.parametrize(
    ("devices", "batch", "prompt", "costs"),
    # The proven bound is below what can be had; the law is below what is simulated.
    [("l4", 64, 512, "predicted"), ("l4,t4", 64, 512, "roofline"), ("l4,t4", 16, 128, "roofline")],
)
@pytest.mark.parametrize("field", ["max_time_to_first_token_s", "max_time_per_output_token_s"])
def test_what_a_refusal_names_is_met_within_two_turns(devices, batch, prompt, costs, field):
    workload = {"batch": batch, "prompt_tokens": prompt, "new_tokens": 16, "bits": (16, 8)}
    limit = 1e-6
    for _turn in range(2):
        with pytest.raises(InfeasibleError) as refused:
            foreplan.plan("serving", "gpt2", devices, workload | {field: limit}, costs=costs)
        named = re.search(rf"{field} of (\S+) or more", str(refused.value))
        assert named is not None, refused.value
        limit = float(named[1])
        with contextlib.suppress(InfeasibleError):
            foreplan.plan("serving", "gpt2", devices, workload | {field: limit}, costs=costs)
            return
    foreplan.plan("serving", "gpt2", devices, workload | {field: limit}, costs=costs)


def test_a_limit_that_the_fastest_plan_keeps_changes_nothing(make_problem):
    """The solver's law has its tokens a hundredth later than the simulator."""
    few = {"batch": 4, "prompt_tokens": 64, "new_tokens": 8}
    free = forecast(make_problem(*ROOMY, **few))
    for field in ("time_to_first_token_s", "time_per_output_token_s"):
        limited = forecast(make_problem(*ROOMY, **few, **{f"max_{field}": free.metrics[field]}))
        assert limited.total_s == free.total_s


@pytest.mark.parametrize(
    ("devices", "workload"),
    # By the law nothing is in time; what it finds in time is late when simulated.
    [
        ("2xl4,2xt4", {"batch": 4, "prompt_tokens": 200, "new_tokens": 17, "bits": 16}),
        ("2xrtx_3090,1xa10", {"batch": 2, "prompt_tokens": 512, "new_tokens": 5, "bits": (16, 8)}),
    ],
)
def test_limits_that_a_baseline_keeps_are_kept(devices, workload):
    def plan(**limits):
        fields = workload | limits
        return foreplan.plan("serving", "tiny-llama-random", devices, fields, costs="roofline")

    other = next(a for a in plan().alternatives if a.name == "even split, most bits").predicted
    names = ("time_to_first_token_s", "time_per_output_token_s")
    limited = plan(**{f"max_{name}": other.metrics[name] for name in names})
    assert limited.predicted.total_s <= other.total_s * (1 + 1e-9)
    assert limited.bound.lower_s <= limited.predicted.total_s
    for name in names:
        assert limited.predicted.metrics[name] <= other.metrics[name] * (1 + 1e-9)


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


@pytest.mark.parametrize("field", ["time_to_first_token_s", "time_per_output_token_s"])
def test_a_decision_is_judged_by_what_is_simulated(make_problem, field):
    problem = make_problem(*ROOMY)
    decision = PLANNER.decide(problem).decision
    assert PLANNER.judged(problem, decision) is decision
    reached = forecast(problem).metrics[field]
    fields = problem.workload.model_dump(exclude_unset=True)
    for share, met in ((1.0, True), (0.99, False)):
        limited = dataclasses.replace(
            problem, workload=type(problem.workload)(**fields | {f"max_{field}": share * reached})
        )
        assert PLANNER.judged(limited, decision).limits_met == met
        # What was missed before, as quality was, stays missed.
        missing = decision.model_copy(update={"limits_met": False})
        assert not PLANNER.judged(limited, missing).limits_met


def test_close_decisions_are_in_time(make_problem):
    free = forecast(make_problem(*ROOMY)).metrics["time_to_first_token_s"]
    problem = make_problem(*ROOMY, max_time_to_first_token_s=1.001 * free)
    near = PLANNER.decide(problem).near
    found = {name: Forecast(PLANNER, problem, d).metrics for name, d in near.items()}
    assert len(found) < len(PLANNER.decide(make_problem(*ROOMY)).near)
    assert all(m["time_to_first_token_s"] <= 1.001 * free * (1 + 1e-9) for m in found.values())
