"""Programs of a training step compute on operands that lie as a step's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.kernels.training_programs import (
    BACKWARD,
    FORWARD,
    dependent_program,
    pool_program,
)
from foreplan.datasets.kernels.training_runnable import training_call
from foreplan.datasets.operators import OPERATORS
from foreplan.datasets.program import Variant, program
from foreplan.errors import SpecError


@pytest.mark.parametrize(
    ("rows", "plane"), [(4096, 256), (16 * 49, 196), (251, 251), (521, 1), (2 * 521, 2)]
)
def test_a_batch_norm_is_timed_on_whole_planes(
    rows: int, plane: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a convolution leaves them: channels that lie side by side take several times as long."""
    seen: list[torch.Tensor] = []
    norm: Any = F.batch_norm

    def batch_norm(x: torch.Tensor, *rest: object) -> Any:
        seen.append(x)
        return norm(x, *rest)

    monkeypatch.setattr(F, "batch_norm", batch_norm)
    variant = Variant("fp32", "fp32", "torch.batch_norm")
    for way in ("forward", "backward"):
        training_call(program(f"norm_{way}", variant, rows=rows, cols=3), "cpu")
    assert {tuple(x.shape) for x in seen} == {(rows // plane, 3, plane)}
    assert all(x.is_contiguous() for x in seen)


POOLED = [
    (nn.MaxPool2d(2), (2, 3, 8, 8)),
    (nn.MaxPool2d(3, 2, 1), (2, 3, 112, 112)),
    (nn.MaxPool2d((1, 3)), (2, 3, 5, 9)),
    (nn.MaxPool2d(3, 2, ceil_mode=True), (1, 4, 15, 15)),
    (nn.AvgPool2d(3, 1, 1), (2, 3, 7, 7)),
    (nn.AdaptiveAvgPool2d(1), (2, 3, 7, 7)),
    (nn.AdaptiveAvgPool2d((3, 2)), (2, 3, 7, 7)),
    (nn.AdaptiveMaxPool2d(2), (2, 3, 8, 8)),
    (nn.MaxPool1d(4), (2, 3, 64)),
    (nn.AvgPool1d(5, 2), (3, 65)),
]


@pytest.mark.parametrize(("pool", "shape"), POOLED, ids=[repr(pool) for pool, _ in POOLED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pool_is_timed_as_it_stands_in_the_network(
    pool: nn.Module, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    graph = capture(pool, [torch.zeros(shape)])
    (node,) = graph.operators("pool")
    word = "fp32" if dtype == torch.float32 else "bf16"
    forward, backward = (pool_program(way, node, word) for way in (FORWARD, BACKWARD))
    assert forward is not None
    assert backward is not None
    made = pool(torch.zeros(shape))
    call = training_call(forward, "cpu")
    call()
    (given, *_), result = call._warm, call.results[-1]
    assert given.shape[-1] == shape[-1]
    assert given.numel() == math.prod(shape)
    assert (result.numel(), result.shape[-1], result.dtype) == (
        made.numel(), made.shape[-1], dtype,
    )  # fmt: skip
    back = training_call(backward, "cpu")
    back()
    (gradient,) = back.results[-1]
    assert gradient.shape == given.shape
    if "adaptive" not in forward.variant.kernel:
        assert forward.flops == node.flops


def test_a_pool_of_volumes_stays_an_elementwise_operator() -> None:
    graph = capture(nn.MaxPool3d(2), [torch.zeros(1, 2, 8, 8, 8)])
    (node,) = graph.operators("pool")
    assert pool_program(FORWARD, node, "fp32") is None
    assert dependent_program(FORWARD, node, "fp32").op == "elementwise_forward"


def test_a_pool_of_no_such_kind_is_refused() -> None:
    sizes = dict.fromkeys(OPERATORS["pool_forward"].dims, 2)
    unknown = program("pool_forward", Variant("fp32", "fp32", "torch.lp_pool2d"), **sizes)
    with pytest.raises(SpecError, match=r"lp_pool2d.*torch.max_pool2d"):
        training_call(unknown, "cpu")
