"""Plans of lanes that have run, priced again as if lanes waited for the slowest by some share.

``python tests/benchmarks/bubbles_with_lag.py FOLDER SHARE...`` reads what ``bubble_ranks.sh`` left
in FOLDER and simulates each plan that ran, from its profiles: no predictions made ahead. A share of
``-`` keeps what the links state.
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
from foreplan.planner.verify.session import problem_of


def with_lag(cluster: Cluster, share: float) -> Cluster:
    """The cluster whose collectives on the spot wait so long for the slowest."""
    tiers = tuple(
        tier.model_copy(
            update={"waited": tuple(f.model_copy(update={"lag_share": share}) for f in tier.waited)}
        )
        for tier in cluster.tiers
    )
    return cluster.model_copy(update={"tiers": tiers})


def main() -> int:
    folder, planner = Path(sys.argv[1]), BubblesPlanner()
    for path in sorted(folder.glob("*/verification.json")):
        plan = load_plan(path.with_name("plan.json"))
        problem = problem_of(plan, planner)
        profiles = Profiles.of(problem.cluster, folder / "profiles")
        decision = validate(planner.decision_type, plan.decision, "decision")
        ran = json.loads(path.read_text())["candidates"][0]
        cells = [f"measured {1e3 * ran['measured_s']:.1f} ms"]
        for share in sys.argv[2:]:
            cluster = problem.cluster if share == "-" else with_lag(problem.cluster, float(share))
            costs = cost_book(cluster, profiles, "measured")
            again = Forecast(planner, replace(problem, cluster=cluster, costs=costs), decision)
            error = 100 * (again.total_s / ran["measured_s"] - 1)
            cells.append(f"{share}: {1e3 * again.total_s:.1f} ms, {error:+.1f} %")
        print(f"{path.parent.name}: {'; '.join(cells)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
