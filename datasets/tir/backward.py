"""backward: the gradient step of a module as a graph that `extract_module` takes.

The module is exported first, so that no Python of its own is left, and the gradient of the mean
square of its outputs is traced over the exported graph. Operators whose gradient TVM's front end
lacks are written with those it has.

Holds for transformers and convolutions. Max and average pooling and upsampling have gradients that
TVM 0.27's front end does not take; such a model is refused when its tasks are extracted.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foreplan.errors import SpecError

_aten = torch.ops.aten


def gradient(module: nn.Module, inputs: Sequence[Any]) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return a module that computes the gradients of the parameters, and its inputs.

    Forward and backward operators are both in it, as in a training step; the optimiser is not, nor
    are gradients of embedding tables (a scatter that TVM's front end does not take).

    Args:
        module: floating parameters, on the CPU; batch norms use their running statistics.
        inputs: positional example inputs.

    Raises:
        SpecError: a model that does not export, or a gradient that cannot be traced.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            graph = torch.export.export(module, tuple(inputs), strict=False).module()
            tables = _embedding_tables(graph)
            every = {name: p.detach() for name, p in graph.named_parameters()}
            parameters = {name: p for name, p in every.items() if name not in tables}
            buffers = dict(graph.named_buffers()) | {name: every[name] for name in tables}

            def step(values: list[Tensor], *arguments: Any) -> list[Tensor]:
                def loss(values: list[Tensor]) -> Tensor:
                    state = dict(zip(parameters, values, strict=True)) | buffers
                    outputs = torch.func.functional_call(graph, state, arguments)
                    parts = outputs if isinstance(outputs, tuple | list) else (outputs,)
                    return torch.stack([part.float().square().mean() for part in parts]).sum()

                return list(torch.func.grad(loss)(values))

            values = list(parameters.values())
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                traced = make_fx(step, decomposition_table=_decompositions())(values, *inputs)
        except Exception as error:  # whatever the model's code raises
            reason = (str(error).splitlines() or [""])[0][:90]
            raise SpecError(
                "gradient",
                got=f"{type(error).__name__}: {reason}",
                expected="a model whose gradient torch traces",
            ) from error
    return traced, (values, *inputs)


def _embedding_tables(graph: Any) -> set[str]:
    """Names of the parameters that rows are looked up in."""
    looked_up = (
        node.args[0] for node in graph.graph.nodes if node.target is _aten.embedding.default
    )
    return {str(node.target) for node in looked_up if node.op == "get_attr"}


def _decompositions() -> dict[Any, Any]:
    from torch._decomp import core_aten_decompositions

    table: dict[Any, Any] = dict(core_aten_decompositions())
    table[_aten.convolution_backward.default] = _convolution_backward
    return table


def _convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    wanted: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of a 2-d convolution as convolutions (as in ``torch.nn.grad``)."""
    if transposed or grad.dim() != 4:
        raise NotImplementedError("gradient of a transposed or non-2-d convolution")
    to_input = to_weight = to_bias = None
    if wanted[0]:
        reached = [
            (grad.shape[2 + d] - 1) * stride[d] - 2 * padding[d]
            + dilation[d] * (weight.shape[2 + d] - 1) + 1
            for d in (0, 1)
        ]  # fmt: skip
        rest = [x.shape[2 + d] - reached[d] for d in (0, 1)]
        to_input = _aten.convolution.default(
            grad, weight, None, stride, padding, dilation, True, rest, groups
        )
    if wanted[1]:
        to_weight = _weight_gradient(grad, x, weight, stride, padding, dilation, groups)
    if wanted[2]:
        to_bias = grad.sum((0, 2, 3))
    return to_input, to_weight, to_bias


def _weight_gradient(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """The input convolved with the gradient, batch and channels changing places."""
    height, width = weight.shape[2:]
    found: Tensor
    if groups == 1:
        found = _aten.convolution.default(
            x.transpose(0, 1), grad.transpose(0, 1), None, dilation, padding, stride, False,
            [0, 0], 1,
        )  # fmt: skip
        return found[:, :, :height, :width].transpose(0, 1)
    batch, channels = x.shape[:2]
    if channels > groups:
        parts = zip(grad.chunk(groups, 1), x.chunk(groups, 1), weight.chunk(groups), strict=True)
        return torch.cat(
            [_weight_gradient(g, i, k, stride, padding, dilation, 1) for g, i, k in parts]
        )
    outputs = grad.shape[1]  # depthwise: each image and channel by itself
    found = _aten.convolution.default(
        x.reshape(1, batch * channels, *x.shape[2:]),
        grad.reshape(batch * outputs, 1, *grad.shape[2:]), None, dilation, padding, stride,
        False, [0, 0], batch * channels,
    )  # fmt: skip
    found = found[:, :, :height, :width].reshape(batch, outputs, 1, height, width)
    return found.sum(0)
