"""Kernels of a backward pass: those that autograd runs, and those of a lowered training step.

What autograd runs is recorded below it. Left out there is what launches nothing (views, scalars),
zeros for what was not read of a split, and copies that only the layout of a gradient asks for,
which no lowered step knows.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foreplan.cost_models.lowering.graph_step import Step
from foreplan.datasets.program import INPUT_GRADIENT, WEIGHT_GRADIENT, Program

#: Kind, and the elements that it works on.
Kernel = tuple[Any, ...]
#: Calls that launch nothing, zeros for what nobody reads, and copies in another layout.
_LEFT_OUT = frozenset(
    {"zeros", "_unsafe_view", "scalar_tensor", "clone", "copy_", "new_empty_strided", "detach"}
)


class _Recorder(TorchDispatchMode):
    """Lists what runs, as kinds and sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Kernel] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        returns = func._schema.returns
        alias = returns[0].alias_info if returns else None
        if alias is None or alias.is_write:
            self.found += Counter(_kernels(name, args, result))
        return result


def _kernels(name: str, args: Any, result: Any) -> list[Kernel]:
    out = result[0] if isinstance(result, (tuple, list)) else result
    if name in ("mm", "bmm", "mv"):
        return [("product", 2 * args[0].numel() * args[1].shape[-1])]
    if name == "convolution_backward":
        by_image, by_weight, by_bias = args[-1]
        return [
            *[("conv", args[1].numel())] * by_image,
            *[("conv", args[2].numel())] * by_weight,
            *[("sum", args[0].shape[1], args[0].numel())] * by_bias,
        ]
    if name in (
        "native_layer_norm_backward", "native_batch_norm_backward", "native_group_norm_backward",
    ):  # fmt: skip
        source, *scale = args[-1]
        values = args[0].numel()
        if source:
            return [("norm", values, 1 + any(scale))]
        return [("sum", result[1].numel(), values)]
    if "attention" in name:
        return [("attention", args[1].numel())]
    if name == "embedding_dense_backward":
        return [("embedding", args[1].numel(), args[2])]
    if name == "index_put":
        return [("scatter", out.numel(), args[2].numel())]
    if name in ("slice_backward", "select_backward"):
        return [("fill", out.numel()), ("map", args[0].numel())]
    if name in ("new_zeros", "zeros_like", "ones_like"):
        return [("fill", out.numel())]
    if name == "nll_loss_backward":  # likelihoods that were picked ride along
        return [("fill", out.numel())]
    if name == "_prelu_kernel_backward":
        return [("map", out.numel())]
    if name in ("sum", "mean"):
        return [("sum", out.numel(), args[0].numel())]
    if name in _LEFT_OUT:
        return []
    return [("map", out.numel())]


def autograd(result: Tensor) -> Counter[Kernel]:
    """Kernels of the backward pass from a result."""
    gradient = torch.rand_like(result)
    with _Recorder() as seen:
        torch.autograd.backward([result], [gradient])
    return seen.found


def priced(steps: list[Step], *, loss: bool = False) -> Counter[Kernel]:
    """Kernels of a lowered step's gradients, with those of the loss or from its result on."""
    found: Counter[Kernel] = Counter()
    for step in steps:
        work = step.work
        assert isinstance(work, Program)
        if step.part != "backward" or (step.target == "cross_entropy" and not loss):
            continue
        d = work.dims
        if work.op in ("linear", "matmul"):
            found["product", int(work.flops)] += 1
        elif work.op == "conv":
            size = d["batch"] * d["cout"] * d["outputs"]  # of a transposed one's input
            if work.variant.kernel.endswith(INPUT_GRADIENT):
                size = d["batch"] * d["cin"] * d["inputs"]
            elif work.variant.kernel.endswith(WEIGHT_GRADIENT):
                size = d["cout"] * d["cin"] // d["groups"] * d["taps"]
            found["conv", size] += 1
        elif work.op == "norm_gradient":
            found["norm", d["rows"] * d["cols"], d["results"]] += 1
        elif work.op.endswith("attention_gradient"):
            size = d["batch"] * d["queries"] * d["heads"] * d["head_dim"]
            found["attention", size] += 1
        elif work.op == "reduction" and "cum" in work.variant.kernel:
            found["map", d["rows"] * d["cols"]] += 1
        elif work.op == "reduction":
            found["sum", d["rows"], d["rows"] * d["cols"]] += 1
        elif work.op == "fill":
            found["fill", d["rows"] * d["cols"]] += 1
        elif work.op == "embedding_backward" and step.target == "aten.embedding":
            found["embedding", d["rows"], d["vocab"]] += 1
        elif work.op == "embedding_backward":
            found["fill", d["vocab"] * d["cols"]] += 1
            found["scatter", d["vocab"] * d["cols"], d["rows"] * d["cols"]] += 1
        else:
            found["map", d["rows"] * d["cols"]] += 1
    return found
