"""What names of kernels say of a call's numbers and indices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foreplan.cost_models.lowering.copy_layout import plain_kernel
from foreplan.cost_models.lowering.graph_programs import lower, programs
from foreplan.cost_models.lowering.map_kernel import map_kernel
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import Variant, program

AT = torch.arange(6) % 4


class Of(nn.Module):
    """A function of rows (6, 16)."""

    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(x)


def rows(x: Tensor) -> Tensor:
    return AT[:, None].expand(-1, x.shape[1])


@pytest.mark.parametrize(
    ("function", "kernel"),
    [
        (lambda x: x.gather(0, rows(x)), "gather_of_rows"),
        (lambda x: x.gather(0, rows(x).contiguous()), "gather_of_places"),
        (lambda x: x.view(16, 6).t().gather(0, rows(x)), "gather_of_places"),  # by columns
        (lambda x: x.gather(1, AT[:, None].expand(-1, 2)), "gather"),
        (lambda x: torch.zeros(4, 16).scatter_add(0, rows(x), x), "scatter_add_of_rows"),
        (lambda x: torch.zeros(4, 16).scatter_add_(0, rows(x), x), "scatter_add_of_rows"),
        (lambda x: torch.zeros(4, 16).scatter_reduce(0, rows(x), x, "amax"),
         "scatter_reduce_of_largest_of_rows"),
        (lambda x: torch.zeros(4, 16).scatter_reduce(0, rows(x), x, "mean", include_self=False),
         "scatter_reduce_of_means_alone_of_rows"),
        (lambda x: torch.zeros(4, 8).scatter_add(0, rows(x[:, :8]), x[:, :8]),
         "scatter_add_of_places"),  # too narrow
        (lambda x: x**2, "pow"), (lambda x: x**0.5, "pow_of_roots"),
        (lambda x: x**4, "pow_of_fourths"), (lambda x: x**1.7, "pow_by_logarithms"),
        (lambda x: 2.0**x, "pow_of_exponents"), (lambda x: x**x, "pow_by_logarithms"),
        (lambda x: torch.multinomial(x, 3, True), "multinomial_repeated"),
        (lambda x: torch.multinomial(x, 1), "multinomial"),
        (lambda x: torch.bucketize(x, torch.zeros(30)), "bucketize"),
        (lambda x: torch.searchsorted(torch.zeros(300), x), "searchsorted_in_many"),
        (lambda x: F.pad(x, (1, 1)), "pad"),
        (lambda x: F.pad(x, (1, 1), mode="reflect"), "pad_reflected"),
        (lambda x: F.embedding_bag(AT[:, None], x, mode="max"), "embedding_bag_of_largest"),
        (lambda x: F.embedding_bag(AT[:, None], x, mode="mean"), "embedding_bag"),
    ],
)  # fmt: skip
def test_names_of_kernels_say_what_chose_them(
    function: Callable[[Tensor], object], kernel: str
) -> None:
    graph = capture(Of(function), [torch.rand(6, 16)], eager=True)
    made = programs(lower(graph))
    assert f"torch.{kernel}" in {item.variant.kernel for item in made}


def test_words_decide_nothing_on_a_gpu() -> None:
    worded, plain = (
        program("elementwise", Variant("fp32", "fp32", kernel), rows=4, cols=8, inputs=2)
        for kernel in ("torch.pad_reflected", "torch.pad")
    )
    assert plain_kernel(worded.variant.kernel) == plain.variant.kernel
    assert map_kernel(worded) == map_kernel(plain)


def test_a_bag_gives_the_gradient_of_its_largest_back_once() -> None:
    class Bag(nn.Module):
        def __init__(self, mode: str) -> None:
            super().__init__()
            self.table, self.mode = nn.Parameter(torch.rand(10, 8)), mode

        def forward(self, ids: Tensor) -> Tensor:
            return F.embedding_bag(ids, self.table, mode=self.mode)

    ids = torch.arange(12).reshape(4, 3) % 10
    for mode, read in (("max", 4), ("sum", 12)):
        steps = lower(capture(Bag(mode), [ids], eager=True, training=True), "training")
        found = [item for item in programs(steps) if item.op == "embedding_backward"]
        assert [item.dims["rows"] for item in found] == [read]
