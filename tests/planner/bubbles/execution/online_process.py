"""``python online_process.py FOLDER RANK``: one process of a training run whose rank 1 gets slow.

Every action lasts as long as it is priced, by sleeping; from a given step on rank 1 takes longer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import bubble_cases as cases
import torch
import torch.distributed as dist

from foreplan.cost_models.costs import CostBook, Estimate, HostLaunch, Work
from foreplan.planner.bubbles import BubblesPlanner
from foreplan.planner.bubbles.execution.trainer import BubbleTrainer
from foreplan.planner.bubbles.online import OnlinePlanner

RANKS, STEPS, SLOW_FROM, SLOWER = 2, 8, 2, 2.5


class Priced:
    """Everything that computes at a fixed price."""

    def estimate(self, work: Work, device: str) -> Estimate | None:
        return Estimate.exact(0.0 if isinstance(work, HostLaunch) else 4e-4)


def problem_of() -> Any:
    made = cases.problem(
        RANKS, [cases.encoder()], microbatches=6, plan={"pp": RANKS}, unit_layers=[0.5]
    )
    return replace(made, costs=CostBook([Priced()]))


def main(folder: Path, rank: int, adaptive: bool) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    problem = problem_of()
    decision = BubblesPlanner().decide(problem).decision
    online = OnlinePlanner(problem, decision, threshold=0.5) if rank == 0 and adaptive else None
    trainer = BubbleTrainer(problem, decision, rank, online=online, adaptive=adaptive)
    compute, factor = trainer.kernels.run, 1.0

    def priced(action: Any) -> None:
        started = time.monotonic()
        compute(action)
        lasts = factor * problem.costs.cost(action.work, "any").mean_s
        time.sleep(max(0.0, started + lasts - time.monotonic()))

    trainer.kernels.run = priced  # type: ignore[method-assign]
    rows = []
    for step in range(STEPS):
        factor = SLOWER if rank == 1 and step >= SLOW_FROM else 1.0
        report = trainer.step()
        rows.append([report.loss, report.timeline.makespan_s, report.replanned])
    if rank == 0:
        slots = [] if online is None else list(online.decision.encoders[0].slots)
        factors = {} if online is None else {" ".join(k): v for k, v in online.factors.items()}
        found = {"steps": rows, "slots": slots, "factors": factors,
                 "first": list(decision.encoders[0].slots)}  # fmt: skip
        (folder / "report.json").write_text(json.dumps(found))
    dist.barrier()
    trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "adaptive")
