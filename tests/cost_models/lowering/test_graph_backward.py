"""What a training step's gradients are made of, beside products and convolutions."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from foreplan.cost_models.lowering.backward_steps import broadcast
from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.lowering.graph_step import Step
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import Program

ROWS, COLS = 6, 8


class Scaled(nn.Module):
    """A norm written out: a power, a mean, a root, and two broadcast products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(COLS, COLS), nn.Parameter(torch.ones(COLS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        scaled: Tensor = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)))
        return scaled


class Halves(nn.Module):
    """Two halves that change places, as a rotation's do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(COLS, COLS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return torch.cat((-x[..., COLS // 2 :], x[..., : COLS // 2]), dim=-1)


class Rolled(nn.Module):
    """Images that go round along some dimensions."""

    def __init__(self, shifts: tuple[int, ...], dims: tuple[int, ...]) -> None:
        super().__init__()
        self.first, self.shifts, self.dims = nn.Linear(COLS, COLS), shifts, dims

    def forward(self, x: Tensor) -> Tensor:
        return torch.roll(self.first(x), self.shifts, self.dims)


def backward(module: nn.Module, *shape: int) -> list[Step]:
    steps = lower(capture(module, [torch.rand(*shape)], eager=True), "training")
    return [step for step in steps if step.part == "backward"]


def works(steps: list[Step]) -> Counter[tuple[str, str, tuple[int, ...]]]:
    return Counter(
        (step.work.op, step.work.variant.kernel.removeprefix("torch."), step.work.sizes)
        for step in steps if isinstance(step.work, Program)
    )  # fmt: skip


def test_broadcast_products_are_summed_up_going_back() -> None:
    found = works([s for s in backward(Scaled(), ROWS, COLS) if s.target == "aten.mul"])
    # By the weight: the gradient times the other operand, summed up over rows.
    assert found["reduction", "backward", (COLS, ROWS)] == 1
    # By the root: the same, summed up over each row.
    assert found["reduction", "sum", (ROWS, COLS)] == 1
    # By the large operands: times the broadcast one.
    assert found["elementwise", "backward_narrow_by_row", (ROWS, COLS, 1)] == 1
    assert found["elementwise", "backward_by_column", (ROWS, COLS, 1)] == 1


def test_a_power_goes_back_in_three_maps() -> None:
    maps = [s.work for s in backward(Scaled(), ROWS, COLS) if s.target == "aten.pow"]
    assert [w.dims["inputs"] for w in maps if isinstance(w, Program)] == [1, 1, 2]


def test_parts_that_were_sliced_off_are_written_whole_going_back() -> None:
    slices = works([s for s in backward(Halves(), ROWS, COLS) if "slice" in s.target])
    assert slices == {
        ("fill", "backward", (ROWS, COLS)): 2,
        ("elementwise", "copy_", (ROWS, COLS // 2, 1)): 2,
    }


@pytest.mark.parametrize(
    ("module", "shape", "sizes"),
    [
        (nn.Sequential(nn.Linear(COLS, COLS), nn.LayerNorm(COLS)), (ROWS, COLS),
         (ROWS, COLS, 1, 2)),
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), (2, 3, 5, 5), (8, 25, 4, 2)),
        (nn.Sequential(nn.Linear(COLS, COLS), nn.LayerNorm(COLS, elementwise_affine=False)),
         (ROWS, COLS), (ROWS, COLS, 1, 1)),
    ],
)  # fmt: skip
def test_a_norm_goes_back_in_one_kernel(
    module: nn.Module, shape: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    found = works([s for s in backward(module, *shape) if s.target.endswith("_norm")])
    assert found == {("norm_gradient", "backward", sizes): 1}


@pytest.mark.parametrize(
    ("shape", "lies"),
    [
        ((6, 1), "_narrow_by_row"),
        ((8,), "_by_column"),
        ((2, 1, 8), "_by_block"),
        ((2, 3, 8), ""),
        ((), ""),
    ],
)
def test_how_a_smaller_operand_lies(shape: tuple[int, ...], lies: str) -> None:
    assert broadcast(shape, (2, 3, 8)) == lies


@pytest.mark.parametrize(
    ("dims", "sizes"),
    # Two images of 3 x 5 pixels: rows before the last dimension that is rolled, what goes round.
    [((1,), (2, 3 * 5 * COLS, 1)), ((1, 2), (2 * 3, 5 * COLS, 2)), ((2, 1), (2 * 3, 5 * COLS, 2)),
     ((-1,), (2 * 3 * 5, COLS, 1)), ((), (1, 2 * 3 * 5 * COLS, 1))],
)  # fmt: skip
def test_a_roll_is_a_copy_for_each_dimension_there_and_back(
    dims: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    module = Rolled((1,) * max(1, len(dims)), dims)
    images = torch.rand(2, 3, 5, COLS)
    steps = lower(capture(module, [images], eager=True), "training")
    found = [step for step in steps if step.target == "aten.roll"]
    assert [step.part for step in found] == ["forward", "backward"]
    assert works(found) == {("roll", "roll", sizes): 2}
    times = sizes[-1]
    assert isinstance(found[0].work, Program)
    assert found[0].work.bytes == 2 * times * images.numel() * 4
    # As often as torch copies: a roll of several dimensions calls a roll of each.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        torch.roll(images, module.shifts, dims)
    assert sum(event.name == "aten::cat" for event in seen.events() or []) == times


def test_an_index_reads_rows_of_a_table_and_adds_them_up_going_back() -> None:
    class Picked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.rand(20, 4))

        def forward(self, at: Tensor) -> Tensor:
            return self.table[at.view(-1)] * 2.0

    module = Picked()
    at = torch.zeros(3, 5, dtype=torch.int64)
    steps = lower(capture(module, [at], eager=True), "training")
    (forward,) = works([s for s in steps if s.target == "aten.index" and s.part == "forward"])
    (back,) = works([s for s in steps if s.target == "aten.index" and s.part == "backward"])
    assert forward == ("embedding", "index", (15, 4))
    assert back == ("embedding_backward", "index", (15, 20, 4))
