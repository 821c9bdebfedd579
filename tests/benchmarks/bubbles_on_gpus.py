"""Bubble plans on the GPUs of one host: decided from three kinds of prices, all run, all compared.

``python tests/benchmarks/bubbles_on_gpus.py FOLDER`` on four GPUs, or with ``--processor`` on four
processes of this machine and small sizes, which tests the way and says nothing about times. Per
shape it

- measures halves of layers, the towers' ends, the optimizer and the links, each as in a step, with
  receives waiting beside them, because those hold multiprocessors;
- decides from these prices, from the shipped predictor's and from the roofline of the published
  figures of the chip, and takes the baselines of the first;
- runs every decision for a few steps, and compares losses and gradients with one process's.

``FOLDER/results.json`` has everything, written after every decision.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from bubbles_gpu_measuring import Measuring
from bubbles_gpu_plans import (
    COMPARED,
    PLANNER,
    RANKS,
    ROUNDS,
    SHAPES,
    actions_of,
    bubbles_of,
    cluster_of,
    plan_shape,
    slug,
    workload_of,
    write,
)

from foreplan.cost_models.costs import CostBook
from foreplan.datasets.specs import validate
from foreplan.planner.base import Problem
from foreplan.planner.bubbles.decision import BubblesDecision
from foreplan.planner.bubbles.spec import BubblesWorkload


class Ranks(Measuring):
    """One of the processes that measure and run; all call the same methods at the same time."""

    # ------------------------------------------------------------------------------------ running

    def run(self, name: str, found: dict[str, Any], results: dict[str, Any]) -> None:
        """Run every decision of a shape; equal ones once."""
        workload, cluster = workload_of(name, self.processor), cluster_of(None, self.processor)
        problem = Problem(None, cluster, workload, CostBook(()))
        seen: dict[str, str] = {}
        for label, plan in found["decisions"].items():
            if "impossible" in plan:
                continue
            decision = validate(BubblesDecision, plan["decision"], label)
            text = json.dumps([plan["decision"][k] for k in ("orders", "stages", "encoders")])
            if text in seen:
                results[label] = {"as": seen[text], "predicted_s": plan["predicted_s"]}
                continue
            seen[text] = label
            compared = name in COMPARED and label == "measured"
            row = self._steps(problem, decision, compared)
            if name in COMPARED[:1] and label == "measured" and self.peers:
                other = self._steps(problem, decision, False, keeps=False)
                row["by_nccl"] = {k: other[k] for k in ("measured_s", "rounds_s", "actions")}
                self.say(f"{label}, messages by NCCL: {1e3 * other['measured_s']:.1f} ms")
            if self.rank == 0:
                predicted = {k: plan[k] for k in ("predicted_s", "bubbles", "metrics", "actions")}
                results[label] = row | {"predicted_s": plan["predicted_s"], "predicted": predicted}
                self.say(
                    f"{name} | {label}: predicted {1e3 * plan['predicted_s']:.1f} ms, measured "
                    f"{1e3 * row['measured_s']:.1f} {[round(1e3 * t, 1) for t in row['rounds_s']]}"
                    f", inside {row['bubbles']['inside_share']:.2f}"
                    f", filled {row['bubbles']['filled_share']:.2f}"
                    f" {row.get('agreement', '')}"
                )

    def _steps(
        self, problem: Problem[BubblesWorkload], decision: BubblesDecision, compared: bool, *,
        keeps: bool = True,
    ) -> dict[str, Any]:  # fmt: skip
        import torch.distributed as dist

        from foreplan.planner.bubbles.execution.entry import (
            compare_steps,
            rank_kernels,
            reference_step,
        )
        from foreplan.planner.verify.channels import connect
        from foreplan.planner.verify.clock import Clock, CudaClock, HostClock
        from foreplan.planner.verify.measured import measured_timeline
        from foreplan.planner.verify.rank_program import rank_programs
        from foreplan.planner.verify.runtime import Runtime

        schedule, _ = PLANNER.real(problem, decision)
        programs = rank_programs(schedule, ordered=not self.processor)
        count = len(programs[self.rank].steps)
        clock: Clock = HostClock(count) if self.processor else CudaClock(count, self.device)
        channels = connect(
            programs, self.rank, backend=self.backend, clock=clock, device=self.device,
            timeout_s=60.0,
        )  # fmt: skip
        kernels = rank_kernels(problem, decision, self.rank, mode="fast")
        kernels.keeps_buffers = keeps
        runtime = Runtime(programs[self.rank], kernels, channels, clock)
        timelines = []
        for turn in range(ROUNDS + 1):
            kernels.reset()
            self.sync()
            record = runtime.execute(dist.barrier)
            records: list[Any] = [None] * RANKS
            dist.all_gather_object(records, record)
            if turn:
                timelines.append(measured_timeline(schedule, records))
        totals = [timeline.makespan_s for timeline in timelines]
        middle = timelines[sorted(range(len(totals)), key=totals.__getitem__)[len(totals) // 2]]
        row: dict[str, Any] = {
            "measured_s": float(np.median(totals)), "rounds_s": totals,
            "bubbles": bubbles_of(middle), "actions": actions_of(middle),
            "memory_bytes": kernels.memory_bytes(),
        }  # fmt: skip
        parts: list[Any] = [None] * RANKS
        if compared:
            dist.all_gather_object(parts, kernels.result())
        del runtime, channels
        gc.collect()
        dist.barrier()  # nobody has the memory open now
        del kernels
        self.free()
        if compared and self.rank == 0:
            merged = {key: value for part in parts for key, value in part.items()}
            agreed = compare_steps(merged, reference_step(problem, decision, mode="fast"))
            row["agreement"] = {"passed": agreed.passed, "exact": agreed.exact} | dict(
                agreed.details
            )
        if compared:
            self.free()
            dist.barrier()
        return row


def be_rank(rank: int, folder: Path, names: list[str], processor: bool, deadline: float) -> None:
    import torch.distributed as dist

    ranks = Ranks(rank, folder, processor)
    ranks.say("measuring")
    ranks.measure(names)
    ranks.say("measured; waiting for plans")
    everything: dict[str, Any] = {}
    for name in names:
        path = folder / f"plans.{slug(name)}.json"
        late: list[Any] = [None]
        while rank == 0 and not path.exists() and time.time() < deadline:
            time.sleep(0.05)
        if rank == 0:
            late = [time.time() > deadline]
        dist.broadcast_object_list(late)
        if late[0]:
            ranks.say(f"{name}: no time left")
            break
        found = json.loads(path.read_text())
        if "failed" in found:
            ranks.say(f"{name}: no plan: {found['failed']}")
            everything[name] = found
            continue
        results: dict[str, Any] = {}
        everything[name] = {k: v for k, v in found.items() if k != "decisions"}
        everything[name]["results"] = results
        ranks.run(name, found, results)
        if rank == 0:
            write(folder / "results.json", everything)
    if not processor and time.time() < deadline:
        dist.barrier()
        beside = ranks.beside_receives(names[0])
        ranks.say(f"beside receives: {beside}")
        if rank == 0:
            write(folder / "receives.json", beside)
    dist.barrier()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=list(SHAPES))
    parser.add_argument("--processor", action="store_true")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--deadline", type=float)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--plan")
    options = parser.parse_args()
    folder = options.folder
    if options.plan is not None:
        try:
            plan_shape(options.plan, folder, options.processor)
        except BaseException as error:
            failed = {"failed": f"{type(error).__name__}: {error}"}
            write(folder / f"plans.{slug(options.plan)}.json", failed)
            raise
        return 0
    if options.rank is not None:
        be_rank(options.rank, folder, options.only, options.processor, options.deadline)
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.json"):
        old.unlink()
    deadline = time.time() + options.seconds
    common = [sys.executable, __file__, str(folder), "--only", *options.only]
    common += ["--processor"] if options.processor else []
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    }  # fmt: skip
    jobs = [["--plan", name] for name in options.only]
    jobs += [["--rank", str(r), "--deadline", str(deadline)] for r in range(RANKS)]
    with tempfile.TemporaryDirectory() as scratch:
        environment["BUBBLES_STORE"] = str(Path(scratch) / "store")
        processes = [subprocess.Popen([*common, *job], env=environment) for job in jobs]
        ranks = processes[-RANKS:]
        try:
            while any(rank.poll() is None for rank in ranks):
                if any(rank.poll() for rank in ranks) or time.time() > deadline + 25.0:
                    return 1  # one that failed would keep the others waiting
                time.sleep(0.2)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
