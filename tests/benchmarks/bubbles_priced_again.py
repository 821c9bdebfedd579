"""Runs of `bubbles_on_gpus.py` priced again, by device alone and with hosts: no GPU needed.

``python tests/benchmarks/bubbles_priced_again.py FOLDER [--piece-ms MS]`` reads what a run left
(``prices.json``, ``plans.*.json``, ``results.json``) and simulates every decision that ran: these
are no predictions made ahead. ``--piece-ms`` is what a half takes the host longer whose sum is an
action of its own, for runs that have not measured it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bubbles_gpu_patience import slug
from bubbles_gpu_plans import PLANNER, measured_problem, without_hosts

from foreplan.datasets.specs import validate
from foreplan.planner.bubbles.decision import BubblesDecision
from foreplan.planner.bubbles.replays import simulated


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--piece-ms", type=float)
    options = parser.parse_args()
    found = json.loads((options.folder / "prices.json").read_text())
    if options.piece_ms is not None:
        found["host_piece_s"] = dict.fromkeys("FB", 1e-3 * options.piece_ms)
    print("| shape | decision | measured | then | devices alone | with hosts |")
    print("|---|---|---|---|---|---|")
    for name, shape in json.loads((options.folder / "results.json").read_text()).items():
        alone = measured_problem(name, without_hosts(found), False)
        hosted = measured_problem(name, found, False)
        plans = json.loads((options.folder / f"plans.{slug(name)}.json").read_text())
        for label, row in shape.get("results", {}).items():
            if "measured_s" not in row:
                continue
            decision = validate(BubblesDecision, plans["decisions"][label]["decision"], label)
            measured = row["measured_s"]
            again = [simulated(where, decision).makespan_s for where in (alone, hosted)]
            cells = [
                f"{1e3 * seconds:.1f} ms, {100 * (seconds / measured - 1):+.1f} %"
                for seconds in (row["predicted_s"], *again)
            ]
            print(f"| {name} | {label} | {1e3 * measured:.1f} ms | {' | '.join(cells)} |")
        chosen = PLANNER.decide(hosted).decision
        print(
            f"| {name} | decided again: {chosen.fill}, units {chosen.encoders[0].units[:3]} | | | "
            f"{1e3 * simulated(alone, chosen).makespan_s:.1f} ms | "
            f"{1e3 * simulated(hosted, chosen).makespan_s:.1f} ms |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
