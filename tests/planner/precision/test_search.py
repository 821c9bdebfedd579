"""The search where the simulator objects to what the solver's rows allow."""

import dataclasses

import numpy as np
import pytest

from foreplan.planner.precision.indicator import omega_table
from foreplan.planner.precision.search import PrecisionSearch
from foreplan.planner.precision.situation import Situation
from foreplan.solvers.choice_score import evaluate


@pytest.fixture(scope="module")
def search(make_problem):
    problem = make_problem(slack=0.05)
    situation = Situation(problem)
    omega = omega_table(situation.task, situation.graph, problem.workload, 0)
    return PrecisionSearch(situation, omega)


@pytest.mark.parametrize("excess", [3e-6, 1e-3])
def test_a_small_objection_costs_little_precision(search, excess, monkeypatch):
    """The plan that is found first becomes late; the next best, not the starting plan, is taken."""
    first = search.run()
    replay = search.situation.replay
    run = type(replay).run
    late = [tuple(map(tuple, first.choices))]

    def objecting(self, choices):
        found = run(self, choices)
        if tuple(tuple(c) for c in choices) not in late:
            return found
        return dataclasses.replace(found, iteration_s=search.target_s * (1 + excess))

    monkeypatch.setattr(type(replay), "run", objecting)
    again = search.run()
    start = sum(
        allocation.omega(choice)
        for allocation, choice in zip(search.allocations, search.start, strict=True)
    )
    assert search.meets(again.replayed)
    assert again.status == "feasible"
    assert first.omega <= again.omega < 0.5 * (first.omega + start)


def test_nothing_is_left_to_raise(search):
    """From the starting plan alone: no single operator could still be computed better in time."""
    filled, replayed = search._filled(search.start)
    assert search.meets(replayed)
    s = search.situation
    for _, k, modules, text in search._raises(filled):
        tables = s.devices[k].tables
        trial = list(filled)
        trial[k] = tables.choice({**tables.names(filled[k]), **dict.fromkeys(modules, text)})
        assert not search.meets(s.replay.run(s.each(trial)))


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_plans_that_meet_the_sufficient_rows_are_in_time(make_problem, steps):
    """Whatever kind keeps its own rows, and whoever is slow at passes or at updates."""
    situation = Situation(make_problem("1xl4,1xt4,1xa100-80g", steps=steps, slack=0.3))
    omega = omega_table(situation.task, situation.graph, situation.workload, 0)
    search, rng, met = PrecisionSearch(situation, omega), np.random.default_rng(4), 0
    for _ in range(24):
        plan = []
        for device in situation.devices:
            names = {
                device.tables.graph.operators[i].module: str(
                    rng.choice([p.name for p in device.tables.options[i]])
                )
                for i in device.tables.graph.adjustable
            }
            plan.append(device.tables.choice(names))
        taken_s = situation.replay.run(situation.each(plan)).iteration_s
        search.target_s = taken_s * (1 + rng.uniform(-0.01, 0.01))
        updates = search._sufficient(plan)
        in_rows = all(
            evaluate(search.problem(k, search.target_s, None, updates[k]), choice.tolist()).feasible
            for k, choice in enumerate(plan)
        )
        met += in_rows
        assert not in_rows or taken_s <= search.target_s * (1 + 1e-9)
    assert met
