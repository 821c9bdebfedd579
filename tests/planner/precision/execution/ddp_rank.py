"""One rank of `test_experiment`: torch's own DDP around a planned model, one backward pass."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from foreplan.planner.precision.execution.decisions import uniform_decision
from foreplan.planner.precision.execution.kernels import sampled_gradients
from foreplan.planner.precision.execution.modules import apply_precision
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
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
