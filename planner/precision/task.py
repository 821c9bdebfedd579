"""`TrainingTask`: what is trained, on which samples, with which loss.

A task is rebuilt from the workload alone in every rank's process, so that weights and samples are
equal wherever they should be. Imports torch when a task is made.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Protocol

from foreplan.datasets.models.model import Model
from foreplan.errors import SpecError
from foreplan.planner.precision.networks import network_builder
from foreplan.planner.precision.spec import PrecisionWorkload

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class TrainingTask(Protocol):
    """A network with its samples and its loss.

    Attributes:
        name: what a reader calls it.
    """

    name: str

    def module(self) -> torch.nn.Module:
        """A new fp32 module with the seed's weights; built under the caller's default device.

        Its ``forward`` takes the inputs of `batch` positionally and returns a tensor, or several in
        a tuple, a list or a mapping.
        """
        ...

    def batch(self, step: int, rank: int) -> tuple[tuple[Any, ...], Any]:
        """(inputs, target) of a worker's step on the CPU; the workload's ``batch`` samples.

        Inputs are tensors in a tuple; the target is what `loss` takes, one tensor or several.

        Unlike ranks and steps get unlike samples; equal arguments get equal ones. Negative steps
        are calibration batches, from the training split too.
        """
        ...

    def loss(self, output: Any, target: Any) -> Tensor:
        """Mean loss in fp32, one number, of what the module returned, in fp32."""
        ...


def training_task(model: Model | None, workload: PrecisionWorkload, seed: int) -> TrainingTask:
    """The task that a workload names.

    Raises:
        SpecError: no such network, it does not take these options, or what it makes is no task.
    """
    task = network_builder(workload.network)(model, workload, seed)
    lacking = [name for name in ("name", "module", "batch", "loss") if not hasattr(task, name)]
    if lacking:
        raise SpecError(
            f"network {workload.network}",
            got=f"{type(task).__name__} without {', '.join(lacking)}",
            expected="a TrainingTask from its builder",
        )  # fmt: skip
    return task


def fingerprint(parameters: Any) -> str:
    """Short hash of a module's (name, shape) pairs: a plan is for one network.

    Args:
        parameters: pairs of name and tensor, as ``module.named_parameters()`` yields.
    """
    text = ";".join(f"{name}:{tuple(tensor.shape)}" for name, tensor in parameters)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def module_bytes(module: torch.nn.Module) -> int:
    """Bytes of parameters, frozen ones too, and of buffers."""
    return sum(
        tensor.numel() * tensor.element_size()
        for held in (module.parameters(), module.buffers())
        for tensor in held
    )
