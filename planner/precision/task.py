"""`TrainingTask`: what is trained, on which samples, with which loss.

A task is rebuilt from the workload alone in every rank's process, so that weights and samples are
equal wherever they should be. Imports torch when a task is made.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from foreplan.datasets.model import Model
from foreplan.errors import SpecError
from foreplan.planner.precision.spec import PrecisionWorkload

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Networks by name: ``module:function``; the function is called with (model, workload, seed).
_NETWORKS = {
    "model": "foreplan.planner.precision.decoder_task:decoder_task",
    "byte_lm": "foreplan.planner.precision.execution.tasks:byte_lm",
    "digits_mlp": "foreplan.planner.precision.execution.tasks:digits_mlp",
    "digits_cnn": "foreplan.planner.precision.execution.tasks:digits_cnn",
}


class TrainingTask(Protocol):
    """A network with its samples and its loss.

    Attributes:
        name: what a reader calls it.
    """

    name: str

    def module(self) -> torch.nn.Module:
        """A new fp32 module with the seed's weights; built under the caller's default device.

        Its ``forward`` takes the inputs of `batch` positionally and returns one tensor.
        """
        ...

    def batch(self, step: int, rank: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """(inputs, target) of a worker's step on the CPU; the workload's ``batch`` samples.

        Unlike ranks and steps get unlike samples; equal arguments get equal ones. Negative steps
        are calibration batches, from the training split too.
        """
        ...

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean loss in fp32 of an fp32 output."""
        ...


def training_task(model: Model | None, workload: PrecisionWorkload, seed: int) -> TrainingTask:
    """The task that a workload names.

    Raises:
        SpecError: no such network, or it does not take these options.
    """
    where = _NETWORKS.get(workload.network, workload.network)
    module, colon, name = where.partition(":")
    if not colon:
        raise SpecError(
            "workload.network", got=workload.network,
            expected=f"one of {', '.join(_NETWORKS)}, or package.module:function",
        )  # fmt: skip
    try:
        build: Callable[..., TrainingTask] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SpecError(
            "workload.network", got=workload.network, expected="a function that can be imported"
        ) from error
    return build(model, workload, seed)


def fingerprint(parameters: Any) -> str:
    """Short hash of a module's (name, shape) pairs: a plan is for one network.

    Args:
        parameters: pairs of name and tensor, as ``module.named_parameters()`` yields.
    """
    text = ";".join(f"{name}:{tuple(tensor.shape)}" for name, tensor in parameters)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
