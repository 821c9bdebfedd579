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
        (lambda x: x + x.t(), "add_across"),
        (lambda x: x + x, "add"),
        (lambda x: x * x[:, :1], "mul_narrow_by_row"),
        (lambda x: nn.functional.gelu(x, approximate="tanh"), "gelu_tanh"),
        (lambda x: nn.functional.gelu(x[:, ::2]), "gelu_apart"),
        (lambda x: x[:1] + x[:1], "add"),  # a part without a gap
        (lambda x: x.view(2, 4, 8).transpose(1, 2) + x.view(2, 8, 4), "add_across"),
        (lambda x: x.view(2, 4, 8).transpose(0, 1) + x.view(4, 2, 8), "add_reordered"),
        # Positions beside features that lie as channels, and beside plain ones.
        (lambda x: x.view(2, 4, 8).transpose(1, 2) + x.view(2, 8, 4)[0], "add_across_by_block"),
        (lambda x: x.view(2, 8, 4) + x.view(2, 8, 4)[0], "add_by_block"),
        (lambda x: x.half() * x[0], "mul_converted_by_column"),
        (lambda x: x.half()[0] * x, "mul_mixed_by_column"),
        (lambda x: x.half() + x, "add_mixed"),
    ],
)
def test_maps_say_how_their_operands_lie(of: Callable[[Tensor], Tensor], name: str) -> None:
    assert kernels(of, 8, 8)[-1] == f"torch.{name}"


def test_two_types_read_one_and_a_half_tensors() -> None:
    steps = lower(capture(Call(lambda x: x.half() + x), [torch.rand(8, 8)]), "inference")
    work = steps[-1].work
    assert isinstance(work, Program)
    assert work.dims == {"rows": 8, "cols": 8, "inputs": 2}


@pytest.mark.parametrize(
    ("of", "shape", "rows", "cols"),
    [
        # Out of channels last, and into them: columns are neighbours of what is written.
        (lambda x: x.permute(0, 3, 1, 2).contiguous(), (2, 4, 5, 8), 16, 20),
        (lambda x: x.contiguous(memory_format=torch.channels_last), (2, 8, 4, 5), 40, 8),
        (lambda x: x.transpose(1, 2).contiguous(), (2, 4, 8), 16, 4),
    ],
)
def test_columns_of_a_copy_are_neighbours_of_what_it_writes(
    of: Callable[[Tensor], Tensor], shape: tuple[int, ...], rows: int, cols: int
) -> None:
    (step,) = lower(capture(Call(of), [torch.rand(shape)]), "inference")
    assert isinstance(step.work, Program)
    assert step.work.dims == {"rows": rows, "cols": cols, "inputs": 1}


def test_a_plain_name_has_no_words() -> None:
    assert plain_kernel("torch.mul_across_mixed") == "torch.mul"
    assert plain_kernel("torch.neg_apart") == plain_kernel("torch.neg") == "torch.neg"
    assert plain_kernel("torch.contiguous_channels_last") == "torch.contiguous"
