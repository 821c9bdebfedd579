"""Bubble plans on the GPUs of one host: decided from three kinds of prices, all run, all compared.

``python tests/benchmarks/bubbles_on_gpus.py FOLDER`` on four GPUs (``BUBBLES_RANKS``: 2, 4, 8), or
with ``--processor`` on as many processes of this machine and small sizes, which tests the way and
says nothing about times. Per shape it

- measures halves of layers, the towers' ends, the optimizer and the links, each as in a step, with
  receives waiting beside them, because those hold multiprocessors;
- decides from these prices, from the shipped predictor's and from the roofline of the published
  figures of the chip, and takes the baselines of the first;
- runs every decision for a few steps, and compares losses and gradients with one process's;
- with ``--eager`` runs some of them operator by operator too (`EAGER`), where hosts may decide.

``FOLDER/results.json`` has everything, written after every decision, and ``FOLDER/table.md`` its
tables, printed at the end whatever happened. First the tests of steps and messages between GPUs
run, each with a limit of its own; messages go by NCCL alone where that of copy engines fails. A
shape is only begun while there is time. A decision that hangs is noted, the processes start again
with the next one, and it is tried once more in the end. ``--extras`` also runs plans with messages
by NCCL and with few thread blocks for collectives, and measures passes beside receives that wait.
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
from bubbles_gpu_patience import Patience, note_hang, over, results_of, slug, write
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
    workload_of,
)
from bubbles_gpu_receives import ReceiveMeasuring
from bubbles_gpu_table import tables

from foreplan.cost_models.costs import CostBook
from foreplan.datasets.specs import validate
from foreplan.planner.base import Problem
from foreplan.planner.bubbles.decision import BubblesDecision
from foreplan.planner.bubbles.spec import BubblesWorkload

#: Tests that have to pass before anything is measured, and their limits in seconds.
CHECKS = {
    "runtime": ("tests/planner/verify/test_verify_cuda.py::test_two_gpus_over_nccl", 50.0),
    "steps": ("tests/planner/bubbles/execution/test_bubble_cuda.py::test_gpus_over_nccl", 90.0),
}

#: Seconds in which all ranks of a hung step end by themselves.
MOMENT_S = 5.0

#: Shapes whose plan runs again with so many thread blocks for collectives at most: one that waits
#: for other ranks keeps its multiprocessors from the passes beside it.
FEW_BLOCKS: dict[str, tuple[int, ...]] = {"small encoder": (4, 8), "12 micro-batches": (4, 8)}


#: Decisions that also run operator by operator, where every kernel costs its host a launch.
EAGER = ("measured", "coarse filling")


class Ranks(ReceiveMeasuring):
    """One of the processes that measure and run; all call the same methods at the same time."""

    def __init__(
        self, rank: int, folder: Path, processor: bool, deadline: float, everything: dict[str, Any],
        extras: bool, eager: bool,
    ) -> None:  # fmt: skip
        super().__init__(rank, folder, processor)
        self._eager = eager
        self._deadline, self._everything, self._extras = deadline, everything, extras
        self._patience = Patience(rank, folder)

    def late(self) -> bool:
        """Whether the time is up, by rank 0's clock; asked by all ranks at the same time."""
        import torch.distributed as dist

        told: list[Any] = [time.time() > self._deadline]
        dist.broadcast_object_list(told)
        return bool(told[0])

    def keep(self) -> None:
        """Write down what there is."""
        if self.rank == 0:
            write(self.folder / "results.json", self._everything)
            (self.folder / "table.md").write_text(tables(self._everything) + "\n")

    # ------------------------------------------------------------------------------------ running

    def run(self, name: str, found: dict[str, Any], results: dict[str, Any], *, hung: bool) -> None:
        """Run every decision of a shape; equal ones once.

        Args:
            name: of the shape.
            found: its plans.
            results: to fill.
            hung: run those that have hung once, else the others.
        """
        workload, cluster = workload_of(name, self.processor), cluster_of(None, self.processor)
        problem = Problem(None, cluster, workload, CostBook(()))
        seen: dict[str, str] = {}
        for label, plan in found["decisions"].items():
            if "impossible" in plan:
                continue
            if self.late():
                self.say(f"{name} | {label}: no time left")
                return
            decision = validate(BubblesDecision, plan["decision"], label)
            text = json.dumps([plan["decision"][k] for k in ("orders", "stages", "encoders")])
            if over(results.get(label, {})):
                seen.setdefault(text, label)
                continue
            if hung != (label in results):
                continue
            if text in seen:
                results[label] = {"as": seen[text], "predicted_s": plan["predicted_s"]}
                continue
            seen[text] = label
            compared = name in COMPARED and label == "measured"
            self._patience.begin(name, label)
            row = self._steps(problem, decision, compared, keeps=self.peers is not None)
            extras = self._extras and label == "measured"
            if extras and name in COMPARED[:1] and self.peers:
                other = self._steps(problem, decision, False, keeps=False)
                row["by_nccl"] = {k: other[k] for k in ("measured_s", "rounds_s", "actions")}
                self.say(f"{label}, messages by NCCL: {1e3 * other['measured_s']:.1f} ms")
            if extras and name in FEW_BLOCKS and not self.processor:
                row["few_blocks"] = {}
                for self.blocks in FEW_BLOCKS[name]:
                    other = self._steps(problem, decision, False, keeps=self.peers is not None)
                    row["few_blocks"][self.blocks] = {
                        k: other[k] for k in ("measured_s", "rounds_s", "actions")
                    }
                    self.say(f"{label}, {self.blocks} blocks: {1e3 * other['measured_s']:.1f} ms")
                self.blocks = None
            if self._eager and label in EAGER and not self.late():
                other = self._steps(
                    problem, decision, False, keeps=self.peers is not None, recorded=False
                )
                row["eager"] = {k: other[k] for k in ("measured_s", "rounds_s", "actions")}
                self.say(
                    f"{name} | {label}, operator by operator: {1e3 * other['measured_s']:.1f} "
                    f"{[round(1e3 * t, 1) for t in other['rounds_s']]}"
                )
            predicted = {k: v for k, v in plan.items() if k != "decision"}
            row |= {"predicted_s": plan["predicted_s"], "predicted": predicted}
            results[label] = results.get(label, {}) | row
            if self.rank == 0:
                self.keep()
                self.say(
                    f"{name} | {label}: predicted {1e3 * plan['predicted_s']:.1f} ms, measured "
                    f"{1e3 * row['measured_s']:.1f} {[round(1e3 * t, 1) for t in row['rounds_s']]}"
                    f", inside {row['bubbles']['inside_share']:.2f}"
                    f", filled {row['bubbles']['filled_share']:.2f}"
                    f" {row.get('agreement', '')}"
                )

    def _steps(
        self, problem: Problem[BubblesWorkload], decision: BubblesDecision, compared: bool, *,
        keeps: bool, recorded: bool = True,
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
        self.opened.clear()
        clock: Clock = HostClock(count) if self.processor else CudaClock(count, self.device)
        during = self._patience.during
        with during("connecting"):
            channels = connect(
                programs, self.rank, backend=self.backend, clock=clock, device=self.device,
                timeout_s=60.0,
            )  # fmt: skip
        with during("loading"):
            kernels = rank_kernels(problem, decision, self.rank, mode="fast", recorded=recorded)
            kernels.keeps_buffers = keeps
            self._patience.rehearse(kernels)
            runtime = Runtime(programs[self.rank], kernels, channels, clock)
        timelines = []
        for turn in range(ROUNDS + 1):
            records: list[Any] = [None] * RANKS
            with during(f"step {turn}", runtime.standing):
                kernels.reset()
                self.sync()
                record = runtime.execute(dist.barrier)
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
        with during("taking leave"):
            if compared:
                dist.all_gather_object(parts, kernels.result())
            del runtime, channels
            gc.collect()
            dist.barrier()  # nobody has the memory open now
            del kernels
            self.free()
        if not compared:
            return row
        with during("comparing"):
            if self.rank == 0:
                merged = {key: value for part in parts for key, value in part.items()}
                agreed = compare_steps(merged, reference_step(problem, decision, mode="fast"))
                row["agreement"] = {"passed": agreed.passed, "exact": agreed.exact} | dict(
                    agreed.details
                )
            self.free()
            dist.barrier()
        return row


def be_rank(
    rank: int, folder: Path, names: list[str], processor: bool, deadline: float, extras: bool,
    eager: bool,
) -> None:  # fmt: skip
    import torch.distributed as dist

    # What an attempt that broke off has left is kept; all ranks find the same.
    left, measured = folder / "results.json", (folder / "prices.json").exists()
    everything: dict[str, Any] = json.loads(left.read_text()) if left.exists() else {}
    ranks = Ranks(rank, folder, processor, deadline, everything, extras, eager)
    if not measured:
        ranks.say("measuring")
        ranks.measure(names)
    ranks.say("measured; waiting for plans")
    for hung, name in [(hung, name) for hung in (False, True) for name in names]:
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
        ranks.run(name, found, results_of(everything, name, found), hung=hung)
        ranks.keep()
    if extras and not processor and time.time() < deadline:
        dist.barrier()
        beside = ranks.beside_receives(names[0])
        ranks.say(f"beside receives: {beside}")
        if rank == 0:
            write(folder / "receives.json", beside)
    dist.barrier()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--extras", action="store_true")
    parser.add_argument("--eager", action="store_true")
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
        be_rank(
            options.rank, folder, options.only, options.processor, options.deadline,
            options.extras, options.eager,
        )  # fmt: skip
        sys.stdout.flush()
        os._exit(0)  # a backend's threads must not outlive the interpreter
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("*.json"), *folder.glob("stacks.*.txt"), *folder.glob("table.md")):
        old.unlink()
    deadline = time.time() + options.seconds
    peers = options.processor or options.no_checks or check(folder)
    common = [sys.executable, __file__, str(folder), "--only", *options.only]
    common += ["--processor"] if options.processor else []
    common += ["--extras"] if options.extras else []
    common += ["--eager"] if options.eager else []
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0",
        "NCCL_GRAPH_REGISTER": "0", "NCCL_GRAPH_MIXING_SUPPORT": "0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32", **({} if peers else {"NO_PEERS": "1"}),
    }  # fmt: skip
    plans = [subprocess.Popen([*common, "--plan", name], env=environment) for name in options.only]
    try:
        while (code := attempt(common, environment, deadline)) and time.time() < deadline:
            if hung := note_hang(folder):
                print(f"{time.strftime('%T')} {hung} hung; on without it", flush=True)
            elif options.processor or "NO_PEERS" in environment:
                break
            else:
                print("again, messages by NCCL alone", flush=True)
                environment |= {"NO_PEERS": "1"}
        note_hang(folder)
    finally:
        for process in plans:
            process.kill()
            process.wait()
        if (folder / "table.md").exists():
            print((folder / "table.md").read_text(), flush=True)
    return code


def attempt(common: list[str], environment: dict[str, str], deadline: float) -> int:
    """Start the ranks and wait for them; 1 if one failed, which keeps the others waiting.

    The others then have a moment to say where they stand: they lose patience at the same time.
    """
    with tempfile.TemporaryDirectory() as scratch:
        environment = environment | {"BUBBLES_STORE": str(Path(scratch) / "store")}
        jobs = [["--rank", str(r), "--deadline", str(deadline)] for r in range(RANKS)]
        ranks = [subprocess.Popen([*common, *job], env=environment) for job in jobs]
        try:
            last = deadline + 25.0
            while any(rank.poll() is None for rank in ranks) and time.time() < last:
                if any(rank.poll() for rank in ranks):
                    last = min(last, time.time() + MOMENT_S)
                time.sleep(0.2)
            return int(any(rank.poll() != 0 for rank in ranks))
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def check(folder: Path) -> bool:
    """Run the tests that measuring relies on, and say whether copy engines carry messages."""
    passed = {}
    for name, (test, limit_s) in CHECKS.items():
        started = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
            passed[name], said = done.returncode == 0, done.stdout[-1500:]
        except subprocess.TimeoutExpired as late:
            passed[name], said = False, f"not over after {late.timeout:g} s"
        word, took_s = "passed" if passed[name] else "FAILED", time.monotonic() - started
        print(f"{time.strftime('%T')} check {name}: {word} after {took_s:.0f} s", flush=True)
        (folder / f"check.{name}.txt").write_text(said)
    return all(passed.values())


if __name__ == "__main__":
    sys.exit(main())
