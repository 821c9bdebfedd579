"""The process of one rank of `experiment.train`: ``python -m ...rank_worker``.

Reads a `RankOrder` as one line of standard input, becomes the device, trains, and writes one line.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from datetime import timedelta
from typing import Any

from foreplan.datasets.specs import validate
from foreplan.errors import ForeplanError
from foreplan.planner.precision.execution.experiment import RankOrder, RankRun, evaluate


def main() -> int:
    """Be one rank; the process's exit code."""
    order = validate(RankOrder, json.loads(sys.stdin.readline()), "order")
    from foreplan.planner.verify.connections import ConnectionLost
    from foreplan.planner.verify.runtime import describe

    answer, code = sys.stdout, 0
    sys.stdout = sys.stderr  # what libraries print must not end up in the answer
    try:
        said = _train(order)
    except Exception as error:
        text = str(error) if isinstance(error, ForeplanError) else describe(error)
        said, code = {"failed": text, "peer": isinstance(error, ConnectionLost)}, 1
    print(json.dumps(said), file=answer, flush=True)
    return code


def _train(order: RankOrder) -> dict[str, Any]:
    from foreplan.planner.verify.placement import assign_cores, take_seat

    seat = take_seat(order.devices[order.rank], assign_cores(order.devices)[order.rank])
    with seat.computing():
        return _train_seated(order, seat)


def _train_seated(order: RankOrder, seat: Any) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    from foreplan.planner.precision.execution.decisions import training_schedule
    from foreplan.planner.precision.execution.kernels import TrainingKernels
    from foreplan.planner.precision.spec import ALL_REDUCE, PrecisionDecision
    from foreplan.planner.precision.task import training_task
    from foreplan.planner.verify.channels import connect
    from foreplan.planner.verify.clock import CudaClock, HostClock
    from foreplan.planner.verify.rank_program import rank_programs
    from foreplan.planner.verify.runtime import Runtime

    decision = _decision(PrecisionDecision, order.decision)
    task = training_task(None, order.workload, order.seed)
    kernels = TrainingKernels(
        task, order.workload, decision, order.rank, device=seat.device, count_memory=True
    )
    sizes = {name: value.numel() for name, value in kernels.module.named_parameters()}
    schedule = training_schedule(decision, [str(device) for device in order.devices], sizes)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here
    timeout = timedelta(seconds=order.timeout_s)
    dist.init_process_group(
        "gloo", store=FileStore(order.store, len(order.devices)), rank=order.rank,
        world_size=len(order.devices), timeout=timeout,
    )  # fmt: skip
    programs = rank_programs(schedule, ordered=order.backend == "nccl")
    program = programs[order.rank]
    steps = len(program.steps)
    cpu = seat.device.type == "cpu"
    clock = HostClock(steps) if cpu else CudaClock(steps, seat.device)
    channels = connect(
        programs, order.rank, backend=order.backend, clock=clock, device=seat.device,
        timeout_s=order.timeout_s,
    )  # fmt: skip
    runtime = Runtime(program, kernels, channels, clock)
    computes = [action.op != ALL_REDUCE for action in schedule if action.rank == order.rank]
    step_s, compute_s = [], []
    for _ in range(order.steps):
        record = runtime.execute(dist.barrier)
        step_s.append((max(record.end_ns) - min(record.start_ns)) / 1e9)
        spans = zip(record.start_ns, record.end_ns, computes, strict=True)
        compute_s.append(sum(end - start for start, end, mine in spans if mine) / 1e9)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    run = RankRun(
        device=str(order.devices[order.rank]),
        losses=tuple(kernels.result()[f"losses_{order.rank}"]),
        step_s=tuple(step_s), compute_s=tuple(compute_s), saved_bytes=kernels.saved_bytes,
        peak_bytes=peak if cpu else int(torch.cuda.max_memory_allocated(seat.device)),
        facts={
            "torch": str(torch.__version__),
            "capability": str(torch.backends.cpu.get_cpu_capability()),
            "threads": str(torch.get_num_threads()),
        },
    )  # fmt: skip
    first = order.rank == 0
    loss = evaluate(kernels, task, order.validation_batches) if first else None
    kernels.close()
    dist.barrier()
    dist.destroy_process_group()
    source = str(getattr(task, "source", task.name))
    return {"run": run.model_dump(mode="json"), "validation_loss": loss, "source": source}


def _decision(kind: Any, document: dict[str, Any]) -> Any:
    """Rebuilt without the planner's checks: experiments run variants that it does not decide."""
    from foreplan.planner.precision.spec import WorkerDecision

    workers = tuple(WorkerDecision.model_construct(**worker) for worker in document["workers"])
    buckets = tuple(tuple(bucket) for bucket in document["buckets"])
    return kind.model_construct(**{**document, "workers": workers, "buckets": buckets})


if __name__ == "__main__":
    finished = main()
    sys.stderr.flush()
    os._exit(finished)  # gloo's threads abort an interpreter that ends while they free a tensor
