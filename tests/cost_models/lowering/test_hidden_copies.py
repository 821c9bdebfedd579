"""Copies that operators make of operands which do not lie as they want them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.lowering.graph_step import Step
from foreplan.cost_models.lowering.hidden_copies import lies_in_rows
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import Program


class Patches(nn.Module):
    """Patches of images as rows, as vision transformers begin."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 16, 4, stride=4)
        self.norm = nn.LayerNorm(16)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(self.cut(images).flatten(2).transpose(1, 2))
        return normed


def copies(images: torch.Tensor, part: str, device: str = "cpu") -> list[Program]:
    module = Patches().to(device)
    steps = lower(capture(module, [images.to(device)], eager=True), "training")
    works = [step.work for step in steps if step.kind == "copy" and step.part == part]
    assert all(isinstance(work, Program) for work in works)
    return [work for work in works if isinstance(work, Program)]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_norm_of_transposed_rows_copies_them(part: str, device: str) -> None:
    (work,) = copies(torch.rand(2, 3, 32, 32), part, device)
    assert work.variant.kernel == "torch.contiguous_channels_last"
    assert work.dims == {"rows": 2 * 64, "cols": 16, "inputs": 1}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_with_channels_last_patches_are_rows_already(device: str) -> None:
    images = torch.rand(2, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    assert not copies(images, "forward", device)


@pytest.mark.parametrize("view", [
    lambda x: x, lambda x: x.t(), lambda x: x[:, :2], lambda x: x[1:], lambda x: x[None],
    lambda x: x.expand(2, 3, 4), lambda x: x[:, None].transpose(0, 1), lambda x: x[:0],
])  # fmt: skip
def test_rows_are_what_torch_calls_contiguous(view: object) -> None:
    assert callable(view)
    tensor = view(torch.rand(3, 4))
    assert lies_in_rows(tensor.shape, tensor.stride()) == tensor.is_contiguous()


class Heads(nn.Module):
    """Products of heads that are views of rows."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        heads = rows.view(self.batch, 6, 4, 8).transpose(1, 2)
        scores = heads @ heads.transpose(-1, -2)
        mixed: torch.Tensor = scores @ heads.contiguous()
        return mixed


def test_a_product_of_heads_copies_what_is_no_list_of_matrices() -> None:
    steps = lower(capture(Heads(2), [torch.rand(12, 32)], eager=True), "inference")
    made = [step.work for step in _of_products(steps)]
    assert [(w.variant.kernel, w.dims) for w in made if isinstance(w, Program)] == [
        ("torch.contiguous", {"rows": 48, "cols": 8, "inputs": 1}),
        ("torch.contiguous_channels_last", {"rows": 64, "cols": 6, "inputs": 1}),
    ]


def test_heads_of_one_sequence_are_a_list_and_gradients_copy_nothing() -> None:
    steps = lower(capture(Heads(1), [torch.rand(6, 32)], eager=True), "inference")
    assert not _of_products(steps)
    module = nn.Sequential(nn.Linear(32, 32), Heads(2))
    steps = lower(capture(module, [torch.rand(12, 32)], eager=True), "training")
    assert {step.part for step in _of_products(steps)} == {"forward"}


def _of_products(steps: list[Step]) -> list[Step]:
    return [step for step in steps if step.kind == "copy" and "matmul" in step.target]
