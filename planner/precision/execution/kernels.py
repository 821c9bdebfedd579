"""One rank of a data-parallel training run in its process: `foreplan.planner.base.Kernels`.

A real, unmodified module runs under the schedule: ``forward`` computes the loss of the rank's
batch, ``backward`` of bucket ``q`` lets autograd run until all gradients of buckets ``0..q`` are
there (see `Baton`), ``all_reduce`` is the runtime's, and ``optimizer`` steps. Gradients are divided
by the number of ranks before they are summed (see `GradientBuckets`). A ``forward`` begins the next
training step, however many the schedule has; batches are those of ``task.batch(step, rank)``, which
`reset` draws for a run, as a loader beside the training would.

Modes: ``fast`` computes as planned; ``reference`` computes everything in fp32, where a distributed
run equals one process bit by bit (two ranks: a sum of two does not depend on the order).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from foreplan.cost_models.quality.in_fp32 import in_fp32
from foreplan.cost_models.schedule import Action
from foreplan.datasets.timing.freed_memory import keep_freed_memory
from foreplan.errors import SpecError
from foreplan.planner.precision.execution._baton import Baton
from foreplan.planner.precision.execution.buckets import GradientBuckets
from foreplan.planner.precision.execution.live_peak import LivePeak
from foreplan.planner.precision.execution.loss_scale import LossScale
from foreplan.planner.precision.execution.modules import apply_variants, restart_rounding
from foreplan.planner.precision.execution.optimizers import (
    make_optimizer,
    make_state,
    state_bytes,
)
from foreplan.planner.precision.execution.saved_tensors import SavedTensors
from foreplan.planner.precision.spec import (
    ALL_REDUCE,
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    PrecisionDecision,
    PrecisionWorkload,
)
from foreplan.planner.precision.task import TrainingTask, module_bytes

MODES = ("fast", "reference")
Batch = tuple[tuple[Any, ...], Any]

#: Gradient elements of each parameter that a run reports, spread evenly.
SAMPLED_GRADIENTS = 16


class TrainingKernels:
    """Carries out the actions of one rank.

    Args:
        task: what is trained.
        workload: optimizer and learning rate.
        decision: precisions of all ranks and the buckets.
        rank: this one.
        mode: one of `MODES`.
        device: where to compute.
        count_memory: count what the first step keeps for its backward pass and what it takes beside
            that, which slows that step.

    Attributes:
        module: what is trained, as planned.

    Raises:
        SpecError: an unknown mode or rank, a plan of another network, a variant that the device
            does not have.
    """

    def __init__(
        self, task: TrainingTask, workload: PrecisionWorkload, decision: PrecisionDecision,
        rank: int, *, mode: str = "fast", device: torch.device | str = "cpu",
        count_memory: bool = False,
    ) -> None:  # fmt: skip
        if mode not in MODES:
            raise SpecError("mode", got=mode, expected=f"one of {', '.join(MODES)}")
        if not 0 <= rank < len(decision.workers):
            raise SpecError("rank", got=rank, expected=f"0..{len(decision.workers) - 1}")
        self._task, self._rank, self._world = task, rank, len(decision.workers)
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        if self._device.type == "cpu":
            keep_freed_memory()
        self.module = task.module().to(self._device).train()
        if mode == "fast":
            apply_variants(self.module, decision.workers[rank].operators, seed=rank << 40)
        self._buckets = GradientBuckets(
            self.module, decision.buckets, self._world, self._bucket_ready
        )
        self._optimizer_words = workload.optimizer, workload.learning_rate
        self._optimizer = make_optimizer(self.module, *self._optimizer_words)
        self._scale = LossScale.of(
            [text for worker in decision.workers for text in worker.operators.values()]
            if mode == "fast" else []
        )  # fmt: skip
        self._saved = SavedTensors(self.module) if count_memory else None
        self._peak_bytes = 0
        self._baton = Baton(self._train, self._device)
        self._step = 0
        self._steps = workload.steps
        self._ahead: dict[int, Batch] = {}
        self._wanted = -1
        self._done = -1
        self._losses: list[Tensor] = []
        self._first: dict[str, list[float]] | None = None

    def reset(self) -> None:
        """Back to the weights of the start, with an optimizer whose state is there."""
        self._baton.drop()
        if self._step:
            fresh = self._task.module()
            with torch.no_grad():
                self.module.load_state_dict(fresh.state_dict())
            self._optimizer = make_optimizer(self.module, *self._optimizer_words)
        self._buckets.clear()
        self._buckets.close()
        make_state(self._optimizer)
        restart_rounding(self.module)
        self._scale.restart()
        self._step, self._losses = 0, []
        # In a step, where caches hold other things, drawing one takes 0.25 ms instead of 0.02.
        self._ahead = {step: self._task.batch(step, self._rank) for step in range(self._steps)}

    def run(self, action: Action) -> None:
        """Go on with the training step up to the end of an action."""
        if action.op == BACKWARD:
            self._wanted = action.step
            if self._done >= self._wanted:  # became ready together with an earlier one
                return
        elif action.op not in (FORWARD, OPTIMIZER):
            raise SpecError(
                "action", got=action.op, expected=f"{FORWARD}, {BACKWARD} or {OPTIMIZER}"
            )
        self._baton.resume()

    def payload(self, action: Action) -> Tensor:
        """The flat gradients of a bucket, already divided by the number of ranks."""
        if action.op != ALL_REDUCE:
            raise SpecError("action", got=action.op, expected=ALL_REDUCE)
        return self._buckets.flat[action.step]

    def buffer(self, action: Action) -> Tensor:
        """Nothing is received."""
        raise SpecError("action", got=action.op, expected="no receives in data-parallel training")

    def result(self) -> dict[str, Any]:
        """Losses of this rank's batches; norms and samples of mean gradients, last and first step.

        The gradients stand under one name for all ranks, so that merging the results of a run
        finds ranks that disagree.
        """
        return {
            f"losses_{self._rank}": [float(loss) for loss in self._losses],
            "gradients": sampled_gradients(self.module, self._scale.value),
            "first_gradients": self._first or {},
        }

    def memory_bytes(self) -> dict[str, int]:
        """Bytes held between steps and, where they were counted, at a step's peak.

        ``activations`` is what was kept for the backward pass, ``workspace`` what operators had at
        the peak beside that, so that the items add up to the peak.
        """
        held = {
            "weights": module_bytes(self.module),
            "gradients": self._buckets.nbytes,
            "optimizer": state_bytes(self._optimizer),
        }
        if self._peak_bytes:
            held["activations"] = self.saved_bytes
            held["workspace"] = max(0, self._peak_bytes - self.saved_bytes)
        return held

    @property
    def saved_bytes(self) -> int:
        """Bytes that the first step kept for its backward pass; 0 where they were not counted."""
        return self._saved.bytes if self._saved is not None else 0

    def validation_loss(self, batches: Iterable[Batch]) -> float:
        """Mean loss of the weights over batches, in fp32 whatever was planned."""
        plain = self._task.module().to(self._device).eval()
        plain.load_state_dict(self.module.state_dict())
        losses = []
        with torch.no_grad():
            for inputs, target in batches:
                output = plain(*self._here(inputs))
                losses.append(float(self._task.loss(output, self._here(target))))
        return sum(losses) / len(losses)

    def close(self) -> None:
        """End the thread that computes; `run` starts another."""
        self._baton.close()

    # --------------------------------------------------------------------- on the baton's thread

    def _train(self) -> None:
        while True:
            ready = self._ahead.pop(self._step, None)
            inputs, target = ready or self._task.batch(self._step, self._rank)
            self._step += 1
            self._buckets.clear()
            self._done = -1
            saved, peak = self._observers()
            with saved, peak:
                output = self.module(*self._here(inputs))
                loss = self._task.loss(in_fp32(output), self._here(target))
            self._losses.append(loss.detach())
            self._baton.pause()
            # Hooks have to run on this thread, and a slice of a GPU ends where the thread ends.
            with torch.autograd.set_multithreading_enabled(False), peak:
                torch.autograd.backward(loss * self._scale.value)
            del output, loss
            if isinstance(peak, LivePeak):
                self._peak_bytes = peak.peak_bytes
            self._buckets.close()
            self._done = len(self._buckets) - 1
            self._baton.pause()
            if self._first is None:  # once: the first step of every run is the same, and is timed
                self._first = sampled_gradients(self.module, self._scale.value)
            self._scale.step(self._optimizer, self._buckets.flat)
            self._baton.pause()

    def _here(self, value: Any) -> Any:
        """Tensors, in whatever holds them, on the rank's device."""
        return pytree.tree_map_only(torch.Tensor, lambda x: x.to(self._device), value)

    def _bucket_ready(self, q: int) -> None:
        # The last bucket's action lasts to the end of the pass.
        if q < len(self._buckets) - 1 and q >= self._wanted:
            self._done = q
            self._baton.pause()

    def _observers(
        self,
    ) -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
        """What counts memory during the very first step; nothing afterwards."""
        if self._saved is None or self._peak_bytes:
            return contextlib.nullcontext(), contextlib.nullcontext()
        held = (*self.module.parameters(), *self.module.buffers(), *self._buckets.flat)
        return self._saved.counting(), LivePeak(held)


def sampled_gradients(module: nn.Module, scale: float = 1.0) -> dict[str, list[float]]:
    """Norm and evenly spread elements of every parameter's gradient, divided by ``scale``."""
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            flat = parameter.grad.detach().reshape(-1)
            every = max(1, flat.numel() // SAMPLED_GRADIENTS)
            some = torch.cat([flat.norm().view(1), flat[::every][:SAMPLED_GRADIENTS]])
            found[name] = (some / scale).tolist()
    return found
