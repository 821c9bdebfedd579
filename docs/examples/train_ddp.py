"""Train a network of your own with a precision plan, data-parallel under torchrun.

python train_ddp.py --plan two_xeons.yaml plan.json      decide, once
torchrun --nproc-per-node 2 train_ddp.py plan.json
"""

import os
import sys

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import foreplan

WORKLOAD = {"network": "two_layers", "batch": 256, "precisions": ["fp32", "bf16"], "slack": 0.25}


class TwoLayers:
    """What is trained, on what, by which loss: a `foreplan.TrainingTask`."""

    name = "two_layers"

    def module(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 512))

    def batch(self, step: int, rank: int) -> tuple[tuple[Tensor, ...], Tensor]:
        torch.manual_seed(1000 * rank + step + 10_000)
        x = torch.randn(256, 512)
        return (x,), x[:, :16].argmax(1)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target)


def train(path: str, steps: int = 20) -> None:
    distributed.init_process_group("gloo")
    rank, task = distributed.get_rank(), TwoLayers()
    model = foreplan.apply_precision(task.module(), path, rank)  # the one line a plan takes
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        inputs, target = task.batch(step, rank)
        loss = task.loss(parallel(*inputs), target)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        if rank == 0 and step % 5 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--plan":
        foreplan.register_network("two_layers", lambda model, workload, seed: TwoLayers())
        plan = foreplan.plan("precision", None, sys.argv[2], WORKLOAD, costs="roofline")
        plan.save(sys.argv[3])
    else:
        train(sys.argv[1])
        os._exit(0)  # gloo's threads abort an interpreter that ends (torch issue 190489)
