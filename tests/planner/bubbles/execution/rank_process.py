"""``python rank_process.py JOBS.json``: runs cases on ranks that are real processes.

The process loads torch, runs nothing, and forks one child a rank; each walks every case with the
runtime of ``planner/verify`` over gloo and writes what it computed beside the jobs.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import bubble_cases
import torch
import torch.distributed as dist
from logged_graphs import LoggedGraphs, LoggedLanes

from foreplan.planner.bubbles.execution import entry
from foreplan.planner.bubbles.execution.step_sizes import StepSizes
from foreplan.planner.verify.channels import connect
from foreplan.planner.verify.clock import Clock, CudaClock, HostClock
from foreplan.planner.verify.rank_program import rank_programs
from foreplan.planner.verify.runtime import Runtime

TIMEOUT_S = 60.0


def run_case(case: dict[str, Any], rank: int) -> dict[str, Any]:
    if "decisions" in case:
        from replanned_steps import replanned_steps

        return replanned_steps(case, rank)
    problem, decision = bubble_cases.of_document(case)
    if "stock" in case:
        from stock_pipeline import stock_step

        sizes = StepSizes.of(problem, decision)
        return stock_step(sizes, case["stock"], rank, len(decision.orders))
    schedule = bubble_cases.schedule_of(problem, decision)
    gpu = case["problem"][1].get("gpu", False)
    programs = rank_programs(schedule, ordered=gpu)
    count = len(programs[rank].steps)
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    clock: Clock = CudaClock(count, device) if gpu else HostClock(count)
    channels = connect(
        programs, rank, backend="nccl" if gpu else "gloo", clock=clock, device=device,
        timeout_s=TIMEOUT_S,
    )  # fmt: skip
    if case.get("recorded"):
        entry.RecordableLanes = LoggedLanes  # type: ignore[misc]
    kernels = entry.rank_kernels(problem, decision, rank, mode=case.get("mode", "reference"))
    if case.get("recorded"):
        kernels.record(LoggedGraphs())
    runtime = Runtime(programs[rank], kernels, channels, clock)
    results = []
    for _ in range(2):  # the second step starts from what the first one left behind
        kernels.reset()
        runtime.execute(dist.barrier)
        results.append(kernels.result())
    assert gpu or results[0] == results[1], "two steps differ"  # atomic sums have no order
    assert kernels.live == 0, "activations were left behind"
    return results[1]


def be_rank(jobs: dict[str, Any], rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    if jobs.get("gpu"):
        count = torch.cuda.device_count()
        torch.cuda.set_device(rank % count)
        if count < jobs["ranks"]:
            # NCCL takes two ranks on one GPU where it believes them to be on two hosts.
            os.environ["NCCL_HOSTID"] = f"rank {rank}"
    else:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    store = dist.FileStore(str(folder / "store"), jobs["ranks"])
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=jobs["ranks"],
        timeout=timedelta(seconds=TIMEOUT_S),
    )  # fmt: skip
    found = [run_case(case, rank) for case in jobs["cases"]]
    (folder / f"result.{rank}.json").write_text(json.dumps(found))
    if dist.is_initialized():  # a trainer that was closed has left the run
        dist.barrier()


def main(path: Path) -> int:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    jobs = json.loads(path.read_text())
    gc.freeze()  # what is loaded by now need not be looked at before every step
    children = []
    for rank in range(jobs["ranks"]):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                be_rank(jobs, rank, path.parent)
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
