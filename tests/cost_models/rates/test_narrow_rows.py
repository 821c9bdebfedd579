"""What rows cost on processors beside their elements, and that nothing else pays for them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.rates.known_rates import KnownRates
from foreplan.cost_models.rates.narrow_rows import narrow_row_s
from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import Program, Variant, program

CORE = Device(
    name="cpu:threads=1", chip="new", vendor="test", kind="cpu", isa=("avx2", "avx512"),
    peak_flops={"fp32/vector": 1e11}, memory_bandwidth=2e10, launch_overhead_s=1e-6,
)  # fmt: skip
AVX2 = CORE.model_copy(update={"isa": ("avx2",)})
NEON = CORE.model_copy(update={"isa": ("neon",)})


def rows(op: str, kernel: str, cols: int, dtype: str = "fp32", *, count: int = 1000) -> Program:
    more = {"inputs": 2} if op == "elementwise" else {}
    return program(op, Variant(dtype, dtype, f"torch.{kernel}"), rows=count, cols=cols, **more)


def test_a_softmax_of_rows_below_a_vector_goes_by_elements() -> None:
    # A thousand rows of 10.5 ns an element, and ten a row, less the wider rows are.
    below = narrow_row_s(rows("softmax", "softmax", 15), CORE, 1e-6)
    assert below == pytest.approx(1e-3 * (15 / 95 + (1 - 15 / 48) / 100))
    whole = narrow_row_s(rows("softmax", "softmax", 16), CORE, 1e-6)
    assert whole == pytest.approx(1e-3 * (1 - 16 / 48) / 100)
    behind = narrow_row_s(rows("softmax", "softmax", 17), CORE, 1e-6)
    assert behind == pytest.approx(1e-3 * ((1 - 17 / 48) / 100 + 1 / 110))
    assert narrow_row_s(rows("softmax", "softmax", 512), CORE, 1e-6) == 0.0


@pytest.mark.parametrize(("device", "lanes"), [(CORE, 16), (AVX2, 8), (NEON, 4)])
def test_vectors_are_the_processors(device: Device, lanes: int) -> None:
    narrow, full = (
        narrow_row_s(rows("elementwise", "softmax_backward", n), device, 1e-6)
        for n in (lanes - 1, lanes)
    )
    assert narrow > full + 1e-3 * (lanes - 2) / 220


def test_sums_cost_their_rows_the_less_the_wider_they_are() -> None:
    for kernel in ("sum", "mean"):
        found = [narrow_row_s(rows("reduction", kernel, n), CORE, 1e-6) for n in (2, 31, 93, 512)]
        assert found == pytest.approx([1e-3 * (1 - 2 / 93) / 360, 1e-3 * (62 / 93) / 360, 0, 0])


def test_what_lies_behind_the_last_step_is_compared_one_by_one() -> None:
    largest = narrow_row_s(rows("reduction", "amax", 63), CORE, 1e-6)
    assert largest == pytest.approx(1e-3 * (31 / 2200 + 31 * 31 / 45000))
    assert narrow_row_s(rows("reduction", "amax", 64), CORE, 1e-6) == 0.0


def test_a_row_has_as_many_records_as_its_logarithm() -> None:
    for cols in (2, 64, 2048):
        found = narrow_row_s(rows("reduction", "max", cols), CORE, 1e-6)
        assert found == pytest.approx(1e-3 * (math.log(cols) / 128 + cols / 2000))
    across = narrow_row_s(rows("reduction", "max_across", 64), CORE, 1e-6)
    assert across == narrow_row_s(rows("reduction", "max", 64), CORE, 1e-6)
    # Over all elements at once it goes by vectors.
    assert narrow_row_s(rows("reduction", "max", 64, count=1), CORE, 1e-6) == 0.0
    assert narrow_row_s(rows("reduction", "argmax", 64, count=1), CORE, 1e-6) > 0.0


def test_a_variance_costs_its_rows_whatever_their_width() -> None:
    for cols, kernel in ((2, "var"), (700, "var"), (21, "std_across")):
        found = narrow_row_s(rows("reduction", kernel, cols), CORE, 1e-6)
        assert found == pytest.approx(1e-3 / 12.3)


def test_halves_fill_vectors_twice_as_long() -> None:
    single, half = (narrow_row_s(rows("softmax", "softmax", 20, of), CORE, 1e-6)
                    for of in ("fp32", "bf16"))  # fmt: skip
    assert half == pytest.approx(1e-3 * 20 / 170)
    assert half > 5 * single


def test_rows_across_and_other_work_cost_nothing() -> None:
    for op, kernel in (("softmax", "softmax_across"), ("reduction", "sum_across"),
                       ("elementwise", "log_softmax_backward_across"), ("elementwise", "add"),
                       ("norm", "group_norm"), ("fill", "zeros")):  # fmt: skip
        item = rows(op, kernel, 4) if op != "fill" else program(
            "fill", Variant("fp32", "fp32", "torch.zeros"), rows=1000, cols=4
        )  # fmt: skip
        assert narrow_row_s(item, CORE, 1e-6) == 0.0
    assert narrow_row_s(rows("softmax", "softmax", 4), device_zoo.device("h200"), 1e-6) == 0.0
    four = CORE.model_copy(update={"units": 4})
    item = rows("norm", "layer_norm", 9)
    assert narrow_row_s(item, four, 1e-6) == pytest.approx(narrow_row_s(item, CORE, 1e-6) / 4)


@pytest.mark.parametrize(("kernel", "op"), [("layer_norm", "norm"), ("softmax", "softmax")])
def test_rows_of_hundreds_stay_as_profiles_have_them(kernel: str, op: str) -> None:
    wide, narrow = (KnownRates.load().seconds([rows(op, kernel, n, count=262144 // n)], CORE)[0]
                    for n in (512, 8))  # fmt: skip
    assert narrow_row_s(rows(op, kernel, 512), CORE, 1e-6) == 0.0
    assert narrow > 3 * wide


@pytest.mark.parametrize(("call", "priced"), [
    (lambda x: x.softmax(-1), True), (lambda x: nn.functional.log_softmax(x, -1), True),
    (lambda x: nn.functional.layer_norm(x, (4,)), True), (lambda x: x.sum(-1), True),
    (lambda x: x.amax(-1), True), (lambda x: x.argmax(-1), True), (lambda x: x.norm(dim=-1), True),
    (lambda x: x.logsumexp(-1), True), (lambda x: x.var(-1), True), (lambda x: x.sum(0), False),
    (lambda x: x.softmax(0), False), (lambda x: x.logsumexp(0), False),
])  # fmt: skip
def test_a_network_asks_by_the_names_that_are_known(call: Any, *, priced: bool) -> None:
    class Called(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return call(x)

    (step,) = lower(capture(Called(), [torch.zeros(1000, 4)], eager=True))
    assert isinstance(step.work, Program)
    assert (narrow_row_s(step.work, CORE, 1e-6) > 0) is priced


@pytest.mark.parametrize("logarithm", [False, True])
def test_gradients_of_a_softmax_name_their_rows(*, logarithm: bool) -> None:
    class Soft(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            function = nn.functional.log_softmax if logarithm else nn.functional.softmax
            return function(super().forward(x), -1).square()

    graph = capture(Soft(8, 4), [torch.zeros(64, 8)], eager=True, training=True)
    steps = [s for s in lower(graph, "training") if s.part == "backward" and s.kind == "softmax"]
    (work,) = [step.work for step in steps]
    assert isinstance(work, Program)
    expected = 1e-6 * 64 * (4 / 220 + (1 - 4 / 48) / 770)
    assert narrow_row_s(work, CORE, 1e-6) == pytest.approx(expected)
