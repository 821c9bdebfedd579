"""Sums over neighbours in memory, and across them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from foreplan.cost_models.lowering.copy_layout import ACROSS
from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.predictor import Predictor
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import Program, Variant, program


class Summed(nn.Module):
    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.call(x)
        return made


@pytest.mark.parametrize(("call", "across"), [
    (lambda x: x.mean(-1), False),
    (lambda x: x.mean((2, 3)), False),
    (lambda x: x.mean(2, keepdim=True), True),
    (lambda x: x.sum(dim=1), True),
    (lambda x: x.permute(0, 2, 3, 1).mean((1, 2)), False),
    (lambda x: x.contiguous(memory_format=torch.channels_last).mean((2, 3)), True),
    (lambda x: x.sum(), False),
    (lambda x: x.var(1), True),
    (lambda x: x.std(-1), False),
    (lambda x: x.max(1)[0], True),
    (lambda x: x.norm(dim=1), True),
    (lambda x: x.topk(2, dim=1)[0], True),
    (lambda x: x.topk(2)[0], False),
    (lambda x: x.cumsum(1), True),
    (lambda x: torch.min(x), False),
    (lambda x: x.mean(2)[:, :, :1].mean(2), False),  # of one value each: nothing across
])  # fmt: skip
def test_sums_say_whether_neighbours_are_summed(call: Any, across: bool) -> None:
    steps = lower(capture(Summed(call), [torch.rand(2, 3, 4, 5)], eager=True), "inference")
    sums = [step.work for step in steps if isinstance(step.work, Program)
            and step.work.op == "reduction"]  # fmt: skip
    assert sums
    assert sums[-1].variant.kernel.endswith(ACROSS) == across


@pytest.mark.parametrize(("dim", "size"), [(1, (40, 3)), (-1, (24, 5))])
def test_scans_and_softmaxes_have_the_rows_that_they_go_through(
    dim: int, size: tuple[int, int]
) -> None:
    for call in (lambda x: x.cumsum(dim), lambda x: x.softmax(dim)):
        graph = capture(Summed(call), [torch.rand(2, 3, 4, 5)], eager=True)
        work = lower(graph)[0].work
        assert isinstance(work, Program)
        assert (work.dims["rows"], work.dims["cols"]) == size


@pytest.mark.parametrize(("call", "across", "size"), [
    (lambda x: x.contiguous(memory_format=torch.channels_last).softmax(1), True, (40, 3)),
    (lambda x: x.transpose(2, 3).log_softmax(-1), False, (30, 4)),
])  # fmt: skip
def test_softmaxes_lay_their_operands_out_in_rows(
    call: Any, across: bool, size: tuple[int, int]
) -> None:
    work = lower(capture(Summed(call), [torch.rand(2, 3, 4, 5)], eager=True))[-1].work
    assert isinstance(work, Program)
    assert (work.dims["rows"], work.dims["cols"]) == size
    assert work.variant.kernel.endswith(ACROSS) == across


def test_short_sums_across_neighbours_read_whole_rows() -> None:
    """Sums of 48 over the height of images, timed in FocalNet on an H200: 10 us, along it 50."""
    size = {"rows": 48 * 96 * 48, "cols": 48}
    along, over = (
        price.mean_s
        for price in Predictor.load().predict(
            [program("reduction", Variant("bf16", "bf16", f"torch.mean{word}"), **size)
             for word in ("", ACROSS)], "h200",
        )
    )  # fmt: skip
    assert over < along / 2
    assert 5e-6 < over < 20e-6
