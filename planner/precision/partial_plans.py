"""Partial plans: mixtures of precisions that no uniform profile ran, to test the replay by.

    python -m foreplan.planner.precision.partial_plans plan CLUSTER WORKLOAD -o plan.json
    foreplan verify plan.json -o verification.json
    python -m foreplan.planner.precision.partial_plans table plan.json verification.json

``plan`` writes a plan whose alternatives are the mixtures, each predicted from the profile of
single operators: with casts and, as the metric ``without_casts_s``, with casts for nothing.
``verify`` runs them like any plan, and ``table`` sets one beside the other.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from foreplan.cost_models.book import CostChoice, Profiles, cost_book
from foreplan.cost_models.costs import CostBook, Estimate, Work
from foreplan.datasets.program import Program
from foreplan.errors import told
from foreplan.planner.api import load_cluster, plan
from foreplan.planner.base import Problem
from foreplan.planner.load_workload import load_workload
from foreplan.planner.plan import Alternative, Plan, load_plan
from foreplan.planner.precision.planner import PrecisionPlanner
from foreplan.planner.precision.pricing import StepTables
from foreplan.planner.precision.situation import Choices, Situation
from foreplan.planner.precision.spec import PrecisionWorkload
from foreplan.planner.predict import Forecast
from foreplan.planner.verify.verification import Verification, load_verification

#: Metric of what is predicted when casts cost nothing.
WITHOUT_CASTS = "without_casts_s"


class FreeCasts:
    """Answers casts with no time at all, and nothing else."""

    def estimate(self, work: Work, device: str) -> Estimate | None:
        """No time for a cast, no answer for other works."""
        cast = isinstance(work, Program) and work.op == "cast"
        return Estimate.exact(0.0) if cast else None


def planned(
    cluster: str, workload: str, costs: CostChoice, seed: int
) -> tuple[Plan, Problem[PrecisionWorkload]]:
    """The plan of a workload, and the problem that it solves.

    Raises:
        SpecError: a description is wrong.
        InfeasibleError: nothing fits.
        MissingDataError: a cost is not known.
    """
    made = plan("precision", None, cluster, workload, costs=costs, seed=seed)
    where, folder = load_cluster(cluster)
    profiles = Profiles.of(where, folder)
    where = profiles.completed(where)
    asked = load_workload("precision", workload)
    assert isinstance(asked, PrecisionWorkload)  # what load_workload gives for this kind
    return made, Problem(None, where, asked, cost_book(where, profiles, costs, issued=True), seed)


def partial_plans(
    cluster: str, workload: str, count: int, *, costs: CostChoice = "measured", seed: int = 0
) -> Plan:
    """A plan whose alternatives are ``count`` mixtures; see the module, and `planned` for errors.

    Args:
        cluster: file of a profiled cluster, or its inline form.
        workload: file of a precision workload.
        count: of mixtures; every device draws its own.
        costs: that they are predicted from.
        seed: of the draws.
    """
    made, problem = planned(cluster, workload, costs, seed)
    free = dataclasses.replace(problem, costs=CostBook([FreeCasts(), *problem.costs.sources]))
    situation, planner = Situation(problem), PrecisionPlanner()
    random = np.random.default_rng(seed)
    forecasts = []
    for number in range(count):
        mixed: Choices = [_mixture(d.tables, number, random) for d in situation.devices]
        decision = situation.decision(mixed, _no_omega(situation), made.predicted.total_s)
        forecasts.append((number, decision, Forecast.of(planner, problem, decision)))
    without = PrecisionPlanner()  # keeps the tables of one problem
    alternatives = []
    for number, decision, forecast in forecasts:
        predicted = forecast.prediction()
        seconds = Forecast.of(without, free, decision).timeline.makespan_s
        metrics = {**predicted.metrics, WITHOUT_CASTS: seconds}
        alternatives.append(
            Alternative(
                name=f"mixture {number + 1}", decision=decision.model_dump(mode="json"),
                limits_met=False, predicted=predicted.model_copy(update={"metrics": metrics}),
            )
        )  # fmt: skip
    return made.model_copy(update={"alternatives": tuple(alternatives)})


def _mixture(tables: StepTables, number: int, random: np.random.Generator) -> np.ndarray:
    """Options of a device: every module draws one, in odd mixtures only one of two at a time."""
    chosen: dict[str, str] = {}
    pairs = number % 2 == 1
    for i in tables.graph.adjustable:
        names = [option.name for option in tables.options[i]]
        few = [names[0], names[1 + number // 2 % (len(names) - 1)]] if len(names) > 1 else names
        chosen[tables.graph.operators[i].module] = str(random.choice(few if pairs else names))
    return tables.choice(chosen)


def _no_omega(situation: Situation) -> dict[str, dict[str, float]]:
    return {
        d.tables.graph.operators[i].module: {p.name: 0.0 for p in d.tables.options[i]}
        for d in situation.devices
        for i in d.tables.graph.adjustable
    }


def replay_table(made: Plan, run: Verification) -> str:
    """Markdown: predicted with and without casts, measured, and both errors."""
    free = {a.name: a.predicted.metrics.get(WITHOUT_CASTS) for a in made.alternatives}
    steps = int(made.workload["steps"])
    lines = ["| plan | predicted | without casts | measured | error | without casts |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    errors: list[tuple[float, float]] = []
    for one in run.candidates:
        cheap = free.get(one.name)
        if one.measured_s is None or one.predicted_s is None or cheap is None:
            continue
        both = tuple(p / one.measured_s - 1.0 for p in (one.predicted_s, cheap))
        errors.append((abs(both[0]), abs(both[1])))
        cells = [f"{1e3 * s / steps:.2f}" for s in (one.predicted_s, cheap, one.measured_s)]
        cells += [f"{100 * e:+.1f} %" for e in both]
        lines.append(f"| {one.name} | {' | '.join(cells)} |")
    if errors:
        mean, worst = np.mean(errors, axis=0), np.max(errors, axis=0)
        cells = [f"{100 * a:.1f} %, {100 * b:.1f} %" for a, b in zip(mean, worst, strict=True)]
        lines.append(f"| mean and worst | | | | {' | '.join(cells)} |")
    return "\n".join(lines)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Cluster, workload, output, costs and seed."""
    parser.add_argument("cluster")
    parser.add_argument("workload")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--costs", choices=("measured", "roofline"), default="measured")
    parser.add_argument("--seed", type=int, default=0)


def main(arguments: Sequence[str] | None = None) -> None:
    """The commands of the module's docstring."""
    parser = argparse.ArgumentParser(description="partial precision plans, to test the replay")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("plan")
    add_plan_arguments(one)
    one.add_argument("--count", type=int, default=8)
    two = commands.add_parser("table")
    two.add_argument("plan", type=Path)
    two.add_argument("verification", type=Path)
    given = parser.parse_args(arguments)
    if given.command == "plan":
        made = partial_plans(
            given.cluster, given.workload, given.count, costs=given.costs, seed=given.seed
        )
        made.save(given.output)
    else:
        print(replay_table(load_plan(given.plan), load_verification(given.verification)))


if __name__ == "__main__":
    with told():
        main()
