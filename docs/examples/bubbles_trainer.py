"""Train with a bubble plan, and change the order of a running training when a device gets slow.

    torchrun --standalone --nproc-per-node 2 bubbles_trainer.py out/bubbles/plan.json --steps 50

Weights and data are random; parts and batches of a model of yours take the place of those in
``execution/parts.py`` and ``execution/batches.py``. One process a device, each pinned.
"""

import argparse
import contextlib
import os
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

import foreplan
from foreplan.cost_models.book import Profiles, cost_book, cost_choice
from foreplan.errors import SpecError
from foreplan.planner.bubbles import BubblesPlanner
from foreplan.planner.bubbles.execution.trainer import BubbleTrainer
from foreplan.planner.bubbles.online import OnlinePlanner
from foreplan.planner.plan import decision_of
from foreplan.planner.verify.session import problem_of


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--drift", type=float, default=0.1)
    options = parser.parse_args()
    rank, planner = int(os.environ["RANK"]), BubblesPlanner()
    plan = foreplan.load_plan(options.plan)
    problem, decision = problem_of(plan, planner), decision_of(plan)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("gloo")
    online = None
    if rank == 0:  # decides for all; it needs the prices that the plan was made from
        profiles = Profiles.of(plan.cluster, options.plan.parent)
        costs = cost_book(plan.cluster, profiles, cost_choice(plan.provenance.costs))
        with contextlib.suppress(SpecError):  # a plan without filling has no other order
            online = OnlinePlanner(replace(problem, costs=costs), decision, threshold=options.drift)
    trainer = BubbleTrainer(problem, decision, rank, online=online, adaptive=True)
    for step in range(options.steps):
        report = trainer.step()
        if rank == 0:
            print(f"step {step}: loss {report.loss:.4f}, {report.timeline.makespan_s:.4f} s")
            print("the next step has another order\n" * report.replanned, end="", flush=True)
    trainer.close()


if __name__ == "__main__":
    main()
