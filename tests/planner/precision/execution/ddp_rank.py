"""One rank of `test_experiment`: torch's own DDP around a planned model.

Prints the gradients of one backward pass, then what an adjustment does in four steps in which
rank 1 is slow.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from foreplan.planner.precision.execution.adjust import LiveAdjustment, PrecisionLadder
from foreplan.planner.precision.execution.decisions import uniform_decision
from foreplan.planner.precision.execution.kernels import sampled_gradients
from foreplan.planner.precision.execution.modules import apply_precision, apply_variants
from foreplan.planner.precision.spec import PrecisionWorkload
from foreplan.planner.precision.task import training_task


def main() -> None:
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rank, plans = order["rank"], order["plans"]
    dist.init_process_group(
        "gloo", store=dist.FileStore(order["store"], len(plans)), rank=rank, world_size=len(plans)
    )
    work = PrecisionWorkload.model_validate_json(json.dumps(order["workload"]))
    task = training_task(None, work, 0)
    model = apply_precision(task.module(), uniform_decision(task, work, plans), rank)
    wrapped = DistributedDataParallel(model)
    inputs, target = task.batch(0, rank)
    task.loss(wrapped(*inputs), target).backward()
    print(json.dumps(sampled_gradients(model)))

    if rank == 1:
        model.register_forward_pre_hook(lambda module, inputs: time.sleep(0.5))
    low, high = "fp32/bf16/torch.linear", "fp32/fp32/torch.linear"
    rungs = [(f"blocks.{i}.up", low, high) for i in range(2)]
    ladder = PrecisionLadder(rank, {name: low for name, _, _ in rungs}, rungs)
    apply_variants(model, ladder.variants)
    adjust = LiveAdjustment(model, ladder, period=2)
    for step in range(4):
        inputs, target = task.batch(step, rank)
        with adjust.step():
            task.loss(wrapped(*inputs), target).backward()
    print(json.dumps([ladder.variants, adjust.history]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
