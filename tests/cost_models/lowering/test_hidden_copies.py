"""Copies that operators make of operands which do not lie as they want them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

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


class Clones(TorchDispatchMode):
    """Shapes of what torch copies."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[list[int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            self.shapes.append(list(args[0].shape))
        return func(*args, **(kwargs or {}))


class Einsum(nn.Module):
    def __init__(self, equation: str) -> None:
        super().__init__()
        self.equation = equation

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.einsum(self.equation, left, right)


@pytest.mark.parametrize(("equation", "right", "count"), [
    ("bhlk,bhtk->bhlt", "heads", 2),  # heads of rows are no list
    ("bhlk,bhtk->bhlt", "list", 1),
    ("bhlk,bhkt->bhlt", "across", 2),
    ("bhlk,hkt->bhlt", "weights", 0),  # batch and rows are one, heads the list
    ("bhlk,kt->bhlt", "matrix", 1),  # three dimensions in turn, none inside the next
    ("bhlk,bhlk->bhl", "heads", 2),
    ("bhlk->blk", None, 0),
])  # fmt: skip
def test_an_einsum_copies_what_torch_copies(equation: str, right: str | None, count: int) -> None:
    heads = torch.rand(12, 32).view(2, 6, 4, 8).transpose(1, 2)
    operands = {"heads": heads, "list": heads.contiguous(), "weights": torch.rand(4, 8, 5),
                "matrix": torch.rand(8, 5),
                "across": heads.transpose(-1, -2), None: heads}  # fmt: skip
    module, given = Einsum(equation), [heads, operands[right]]
    if right is None:
        module.forward = lambda left, right: torch.einsum(equation, left)  # type: ignore[method-assign]
    steps = lower(capture(module, given, eager=True), "inference")
    works = [step.work for step in steps if step.kind == "copy" and "einsum" in step.target]
    sizes = [work.dims["rows"] * work.dims["cols"] for work in works if isinstance(work, Program)]
    with Clones() as made:
        module(*given)
    assert sizes == [math.prod(shape) for shape in made.shapes]
    assert len(sizes) == count


class Convolved(nn.Module):
    """Tokens behind one of a class as an image, as CvT convolves them."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first, self.by_channel = first, nn.Conv2d(8, 8, 3, padding=1, groups=8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        image = tokens[:, self.first :].transpose(1, 2).view(2, 8, 4, 4)
        made: torch.Tensor = self.by_channel(image)
        return made


@pytest.mark.parametrize(("first", "count"), [(1, 1), (0, 0)])
def test_a_convolution_copies_images_with_gaps_and_its_gradient_again(
    first: int, count: int
) -> None:
    module = Convolved(first)
    graph = capture(module, [torch.rand(2, 16 + first, 8)], eager=True)
    steps = lower(graph, "training")
    made = [step for step in steps if step.kind == "copy" and "conv2d" in step.target]
    assert [step.part for step in made] == ["forward", "backward"][: 2 * count]
    for step in made:  # pixel by pixel, each with its channels
        assert isinstance(step.work, Program)
        assert step.work.variant.kernel == "torch.contiguous"
        assert step.work.dims == {"rows": 32, "cols": 8, "inputs": 1}


def test_a_convolution_takes_images_either_way() -> None:
    plain = torch.rand(2, 3, 8, 8)
    for image in (plain, plain.contiguous(memory_format=torch.channels_last), plain[:, :1]):
        module = nn.Conv2d(image.shape[1], 4, 3)
        steps = lower(capture(module, [image], eager=True), "inference")
        gaps = not (image.is_contiguous()
                    or image.is_contiguous(memory_format=torch.channels_last))  # fmt: skip
        assert sum(step.kind == "copy" for step in steps) == gaps
