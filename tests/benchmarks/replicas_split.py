"""A thousand devices of five kinds dealt to replicas: time, bound, groups solved.

python -m tests.benchmarks.replicas_split [--model llama-2-70b] [--devices 4] [--bits 16 8 4]

Costs are the roofline's: the split is simulated, nothing ran on these devices. Prints one JSON
document; CPU seconds are of this process, so that they mean the same on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import time

import foreplan
from foreplan.cost_models.book import Profiles, cost_book
from foreplan.datasets.specs import validate
from foreplan.planner.base import Problem
from foreplan.planner.predict import Forecast
from foreplan.planner.serving.replica_spec import ReplicasWorkload
from foreplan.planner.serving.replicas import ReplicasPlanner

CLUSTER = "400xt4,250xl4,150xa10,120xv100-32g,80xa100-80g"


def main() -> None:
    """Decide once and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-2-70b")
    parser.add_argument("--cluster", default=CLUSTER)
    parser.add_argument("--devices", type=int, default=4, help="most devices of a replica")
    parser.add_argument("--bits", type=int, nargs="+", default=[16, 8, 4])
    parser.add_argument("--least-bits", type=float, default=8.0, help="on average")
    given = parser.parse_args()
    cluster, _ = foreplan.load_cluster(given.cluster)
    fields = {
        "batch": 64, "prompt_tokens": 512, "new_tokens": 100, "bits": given.bits,
        "min_average_bits": given.least_bits, "replica_devices": given.devices,
    }  # fmt: skip
    planner = ReplicasPlanner()
    problem = Problem(
        foreplan.load_model(given.model), cluster, validate(ReplicasWorkload, fields, "workload"),
        cost_book(cluster, Profiles(), "roofline"),
    )  # fmt: skip
    wall, cpu = time.perf_counter(), time.process_time()
    choice = planner.decide(problem)
    spent = time.process_time() - cpu
    figures = Forecast(planner, problem, choice.decision).metrics
    document = {
        "model": given.model, "cluster": given.cluster, "ranks": len(cluster.ranks()),
        "most_devices": given.devices, "cpu_s": spent, "wall_s": time.perf_counter() - wall,
        "gap": choice.bound.gap, "status": choice.bound.status,
        "groups_solved": choice.bound.evaluations, "figures": figures,
        "proof": choice.assumptions[-1],
    }  # fmt: skip
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
