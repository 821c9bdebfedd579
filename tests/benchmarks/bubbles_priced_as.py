"""Plans that have run, priced again as if their cluster had been measured in another way.

``python tests/benchmarks/bubbles_priced_as.py FOLDER WAY...`` reads what ``bubble_ranks.sh`` left
there and simulates each decision that ran, from its profiles: no predictions made ahead. A way is
``-`` for the prices as they are, ``lag=SHARE`` for lanes that wait for the slowest by that share,
``alone`` for programs priced as the profile timed them, without passes of ranks at work together;
or several, joined by commas.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from foreplan.cost_models.book import Profiles, cost_book
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.specs import validate
from foreplan.planner.bubbles.planner import BubblesPlanner
from foreplan.planner.plan import load_plan
from foreplan.planner.predict import Forecast
from foreplan.planner.verify.candidates import candidates_of
from foreplan.planner.verify.session import problem_of


def measured_as(cluster: Cluster, way: str) -> Cluster:
    """The cluster as it would state what was measured."""
    for word in way.split(","):
        if word == "alone":
            others = tuple(c for c in cluster.contention if c.kind != "training")
            cluster = cluster.model_copy(update={"contention": others})
        elif word.startswith("lag="):
            share = {"lag_share": float(word.removeprefix("lag="))}
            tiers = tuple(
                tier.model_copy(
                    update={"waited": tuple(f.model_copy(update=share) for f in tier.waited)}
                )
                for tier in cluster.tiers
            )
            cluster = cluster.model_copy(update={"tiers": tiers})
        elif word != "-":
            raise SystemExit(f"{word}: none of -, alone and lag=SHARE")
    return cluster


def main() -> int:
    folder, planner = Path(sys.argv[1]), BubblesPlanner()
    errors: dict[str, list[float]] = {}
    for path in sorted(folder.glob("*/verification.json")):
        plan = load_plan(path.with_name("plan.json"))
        problem = problem_of(plan, planner)
        profiles = Profiles.of(problem.cluster, folder / "profiles")
        ran = {one["name"]: one for one in json.loads(path.read_text())["candidates"]}
        for candidate in candidates_of(plan, planner, problem):
            measured_s = ran.get(candidate.name, {}).get("measured_s")
            if not measured_s:
                continue
            decision = validate(planner.decision_type, candidate.decision, "decision")
            cells = [f"measured {1e3 * measured_s:.1f} ms"]
            for way in sys.argv[2:]:
                cluster = measured_as(problem.cluster, way)
                costs = cost_book(cluster, profiles, "measured")
                posed = replace(problem, cluster=cluster, costs=costs)
                again = Forecast(planner, posed, decision)
                error = again.total_s / measured_s - 1
                errors.setdefault(way, []).append(abs(error))
                cells.append(f"{way}: {1e3 * again.total_s:.1f} ms, {100 * error:+.1f} %")
            print(f"{path.parent.name}, {candidate.name}: {'; '.join(cells)}", flush=True)
    for way, each in errors.items():
        print(f"{way}: {100 * sum(each) / len(each):.1f} % in the mean of {len(each)} decisions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
