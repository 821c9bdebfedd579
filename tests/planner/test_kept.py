"""A bounded store, and that a plan simulates each decision once."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.planner.api import plan
from foreplan.planner.base import Problem
from foreplan.planner.kept import Kept
from foreplan.planner.predict import Forecast
from foreplan.planner.serving import ServingPlanner


@given(st.integers(0, 12), st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=30))
def test_the_latest_are_kept_as_far_as_they_fit(most, asked):
    """A model of it: keys of size key + 1, the one asked for last at the end."""
    kept, held = Kept(most), []
    for key, fails in asked:
        made = []

        def make(key=key, fails=fails, made=made):
            made.append(key)
            if fails:
                raise ValueError
            return str(key)

        known = key in held
        try:
            assert kept.get(key, make, lambda found: int(found) + 1) == str(key)
        except ValueError:
            assert fails
            assert not known
        else:
            if known:
                held.remove(key)
            if key + 1 <= most:
                held.append(key)
            while sum(k + 1 for k in held) > most:
                held.pop(0)
        assert made == ([] if known else [key])
        assert len(kept) == len(held)


@pytest.mark.parametrize("workload", [
    {"batch": 4, "prompt_tokens": 16, "new_tokens": 8},
    {"batch": 4, "prompt_tokens": 16, "new_tokens": 8, "max_time_to_first_token_s": 10.0},
    {"batch": 8, "prompt_tokens": 16, "new_tokens": 4, "bits": [8, 4], "min_average_bits": 5},
])  # fmt: skip
def test_a_plan_simulates_each_decision_once(monkeypatch, workload):
    simulated: Counter[str] = Counter()
    made = Forecast.__init__

    def counted(self, planner, problem, decision):
        simulated[decision.model_dump_json()] += 1
        made(self, planner, problem, decision)

    monkeypatch.setattr(Forecast, "__init__", counted)
    plan("serving", "demo-llama-random", "2xt4,l4", workload, costs="roofline")
    assert simulated
    assert set(simulated.values()) == {1}


def test_another_problem_knows_nothing_of_it(make_problem):
    planner, problem = ServingPlanner(), make_problem(64.0, 64.0)
    decision = planner.decide(problem).decision
    first = Forecast.of(planner, problem, decision)
    assert Forecast.of(planner, problem, decision.model_copy()) is first
    again = Problem(problem.model, problem.cluster, problem.workload, problem.costs)
    assert again == problem
    assert Forecast.of(planner, again, decision) is not first
    assert Forecast.of(planner, again, decision).total_s == first.total_s
