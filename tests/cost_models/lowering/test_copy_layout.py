"""What names of kernels say of how a copy's or a map's elements lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from foreplan.cost_models.lowering.copy_layout import plain_kernel
from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import Program


class Call(nn.Module):
    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        return self.of(x)


def kernels(of: Callable[[Tensor], Tensor], *shape: int) -> list[str]:
    steps = lower(capture(Call(of), [torch.rand(shape)]), "inference")
    return [step.work.variant.kernel for step in steps if isinstance(step.work, Program)]


@pytest.mark.parametrize(
    ("of", "name"),
    [
        (lambda x: x.clone(), "clone_dense"),
        (lambda x: x.t().contiguous(), "contiguous_transposed"),
        (lambda x: x[:, :4].contiguous(), "contiguous"),
        (lambda x: x.view(2, 4, 8).transpose(1, 2).contiguous(), "contiguous_channels_last"),
        (lambda x: x.view(2, 4, 8).transpose(0, 1).contiguous(), "contiguous"),
        (
            lambda x: x.view(2, 4, 2, 4).contiguous(memory_format=torch.channels_last),
            "contiguous_channels_last",
        ),
        (lambda x: torch.cat([x, x], 1), "cat"),
        (lambda x: torch.cat([x[:, 4:], x], 1), "cat_apart"),
    ],
)
def test_copies_say_how_they_lie(of: Callable[[Tensor], Tensor], name: str) -> None:
    assert kernels(of, 8, 8) == [f"torch.{name}"]


@pytest.mark.parametrize(
    ("of", "name"),
    [
        (lambda x: -x, "neg"),
        (lambda x: -x[:, :4], "neg_apart"),
        (lambda x: -x.t(), "neg"),  # dense in another order, as its result is
        (lambda x: x + x.t(), "add_reordered"),
        (lambda x: x + x, "add"),
        (lambda x: x * x[:, :1], "mul_by_row"),
        (lambda x: nn.functional.gelu(x, approximate="tanh"), "gelu_tanh"),
        (lambda x: nn.functional.gelu(x[:, ::2]), "gelu_apart"),
        (lambda x: x[:1] + x[:1], "add"),  # a part without a gap
    ],
)
def test_maps_say_how_their_operands_lie(of: Callable[[Tensor], Tensor], name: str) -> None:
    assert kernels(of, 8, 8) == [f"torch.{name}"]


def test_a_plain_name_has_no_words() -> None:
    assert plain_kernel("torch.neg_apart") == plain_kernel("torch.neg") == "torch.neg"
    assert plain_kernel("torch.contiguous_channels_last") == "torch.contiguous"
