"""The optimizers that a precision workload can name, on fp32 master weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def make_optimizer(module: nn.Module, name: str, learning_rate: float) -> torch.optim.Optimizer:
    """``sgd`` (momentum 0.9) or ``adamw`` (weight decay 0.01), one fused call a step.

    Args:
        module: whose trained parameters to step.
        name: as `foreplan.planner.precision.spec.PrecisionWorkload.optimizer` says.
        learning_rate: of all steps.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=learning_rate, momentum=0.9, fused=True)
    return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.01, fused=True)


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer make the state that its first step makes otherwise, and no step.

    Making it takes a GPU's host 10 us a tensor, which a training run spreads over all its steps.

    Args:
        optimizer: one of `make_optimizer` whose parameters have gradients of 0.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"].zero_()


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state; 0 before its first step."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, Tensor))
