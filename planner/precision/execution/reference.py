"""All ranks of a training run in one process: the reference of a real run, and a fast simulation.

Each rank keeps its own module and computes by its own plan, one after another; gradients are
averaged in memory. Two ranks give the bits of a distributed run on the same processor, because it
is the same `TrainingKernels` and a sum of two numbers has no order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from foreplan.cost_models.costs import HostLaunch
from foreplan.cost_models.schedule import Action
from foreplan.planner.base import Agreement
from foreplan.planner.precision.execution.kernels import TrainingKernels
from foreplan.planner.precision.spec import (
    ALL_REDUCE,
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    PrecisionDecision,
    PrecisionWorkload,
)
from foreplan.planner.precision.task import TrainingTask

#: Largest relative difference of losses, and of all sampled gradients of the first step together,
#: that a run may show against one process, by mode.
#:
#: ``reference`` computes everything in fp32. Ranks of one instruction set give equal bits; unlike
#: ones add up products in another order and width. Such a sum of n terms differs by about sqrt(n) u
#: (u = 2**-24; Higham & Mary, A new approach to probabilistic rounding error analysis, 2019):
#: 1e-5 stands for n = 28,000, and is 400 times finer than one rounding to bf16 (2**-8).
#: ``fast`` is as planned: bf16 and quantised values that round the other way round.
#:
#: Later gradients are of weights that the optimizer has made unlike. AdamW moves a weight by the
#: learning rate times g / (|g| + eps), however small g is; where a gradient is nothing but
#: rounding (a key's bias: softmax does not see what is added to all scores of a query), so is the
#: whole move. Measured on AVX-512 and AVX2, byte_lm of width 256: first gradients 1.8e-7 apart,
#: those of the second step 3.4e-6 at a learning rate of 0.002, 95 % of the squared difference of
#: the weights in 256 of 1.7M, nearly all of them keys' biases. With SGD 1.6e-7. So they are told,
#: not judged; that later steps are right is seen by their losses.
LOSS_TOLERANCE = {"reference": 1e-5, "fast": 0.01}
GRADIENT_TOLERANCE = {"reference": 1e-5, "fast": 0.05}


class LocalRanks:
    """The ranks of a decision, side by side in this process.

    Args:
        task, workload, decision, mode, device, count_memory: as of `TrainingKernels`.

    Attributes:
        ranks: kernels of each rank.
    """

    def __init__(
        self, task: TrainingTask, workload: PrecisionWorkload, decision: PrecisionDecision, *,
        mode: str = "fast", device: torch.device | str = "cpu", count_memory: bool = False,
    ) -> None:  # fmt: skip
        self.ranks = [
            TrainingKernels(
                task, workload, decision, rank, mode=mode, device=device, count_memory=count_memory
            )
            for rank in range(len(decision.workers))
        ]
        self._buckets = len(decision.buckets)

    def step(self) -> None:
        """One training step of all ranks."""
        self._run(FORWARD)
        for q in range(self._buckets):
            self._run(BACKWARD, q)
            sent = [rank.payload(_action(ALL_REDUCE, q)) for rank in self.ranks]
            total = sent[0].clone()
            for flat in sent[1:]:
                total += flat
            for flat in sent:
                flat.copy_(total)
        self._run(OPTIMIZER)

    def result(self) -> dict[str, Any]:
        """What a distributed run reports, merged."""
        return {name: value for rank in self.ranks for name, value in rank.result().items()}

    def close(self) -> None:
        """End the ranks' threads."""
        for rank in self.ranks:
            rank.close()

    def _run(self, op: str, step: int = -1) -> None:
        for rank in self.ranks:
            rank.run(_action(op, step))


def single_process_training(
    task: TrainingTask, workload: PrecisionWorkload, decision: PrecisionDecision, *, mode: str,
    steps: int, device: torch.device | str = "cpu",
) -> dict[str, Any]:  # fmt: skip
    """What the ranks of a run of ``steps`` training steps must report."""
    local = LocalRanks(task, workload, decision, mode=mode, device=device)
    for _ in range(steps):
        local.step()
    result = local.result()
    local.close()
    return result


def compare_training(result: dict[str, Any], reference: dict[str, Any], *, mode: str) -> Agreement:
    """Compare a run with `single_process_training`.

    ``exact`` says whether all bits are equal, as they are on ranks with one instruction set; what
    passes is `LOSS_TOLERANCE` and `GRADIENT_TOLERANCE` of the mode.
    """
    exact = result == reference
    names = [name for name in reference if name.startswith("losses_")]
    loss_error = max(
        (_loss_error(result.get(name, []), reference[name]) for name in names),
        default=math.inf,
    )
    first, last = (
        relative_error(result.get(name, {}), reference[name])
        for name in ("first_gradients", "gradients")
    )
    close = loss_error <= LOSS_TOLERANCE[mode] and first <= GRADIENT_TOLERANCE[mode]
    details = {"loss_error": loss_error, "gradient_error": first, "last_gradient_error": last}
    return Agreement(close, exact, details)


def _loss_error(found: Sequence[float], expected: Sequence[float]) -> float:
    """Largest relative difference; infinite where a loss lacks or is no number."""
    if len(found) != len(expected) or not all(map(math.isfinite, (*found, *expected))):
        return math.inf
    pairs = zip(found, expected, strict=True)
    return max((abs(a - b) / max(abs(b), 1e-12) for a, b in pairs), default=0.0)


def relative_error(
    found: dict[str, Sequence[float]], expected: dict[str, Sequence[float]]
) -> float:
    """Norm of the difference of all sampled gradients over the norm of those expected."""
    if found.keys() != expected.keys():
        return math.inf
    # The first number of each row is the norm, which is no sample.
    pairs = [pair for n in expected for pair in zip(found[n][1:], expected[n][1:], strict=True)]
    difference = sum((a - b) ** 2 for a, b in pairs)
    return float((difference / max(sum(b * b for _, b in pairs), 1e-30)) ** 0.5)


def _action(op: str, step: int = -1) -> Action:
    return Action(op=op, rank=0, work=HostLaunch(), step=step)
