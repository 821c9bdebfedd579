"""What steps through memory cost on processors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.rates.rows_across import across_s
from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import Program, Variant, program

CORE = Device(
    name="cpu:threads=1", chip="new", vendor="test", kind="cpu", isa=("avx2",),
    peak_flops={"fp32/vector": 1e11}, memory_bandwidth=2e10, launch_overhead_s=1e-6,
)  # fmt: skip


def reduced(kernel: str, rows: int, cols: int) -> Program:
    return program("reduction", Variant("fp32", "fp32", f"torch.{kernel}"), rows=rows, cols=cols)


def mapped(kernel: str, rows: int, cols: int) -> Program:
    variant = Variant("fp32", "fp32", f"torch.{kernel}")
    return program("elementwise", variant, rows=rows, cols=cols, inputs=2)


def test_scans_whose_steps_crowd_cost_each_element() -> None:
    # One element in 290 of a call: 3.4 ns.
    for kernel in ("cumsum", "cumprod"):
        far = across_s(reduced(f"{kernel}_in_few_sets_across", 512, 1024), CORE, 1e-6)
        assert far == pytest.approx(1e-6 * 512 * 1024 / 290)
        for name in (kernel, f"{kernel}_across"):
            assert across_s(reduced(name, 512, 1024), CORE, 1e-6) == 0.0


@pytest.mark.parametrize(
    ("shape", "dim", "crowds"),
    [
        # 4 KiB a step: all fall into one set of 12 lines; 1 KiB into four.
        ((4, 13, 1024), 1, True),
        ((4, 12, 1024), 1, False),
        ((49, 256), 0, True),
        ((48, 256), 0, False),
        # 256 bytes into 16, so that 192 have room; 28 bytes share lines.
        ((4, 300, 64), 1, True),
        ((4, 190, 64), 1, False),
        ((4, 1000, 7), 1, False),
        ((4, 1000, 1024), 2, False),
    ],
)
def test_a_scan_says_whether_its_steps_crowd(
    shape: tuple[int, ...], dim: int, *, crowds: bool
) -> None:
    class Called(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.cumsum(dim)

    (step,) = lower(capture(Called(), [torch.zeros(shape)], eager=True))
    assert isinstance(step.work, Program)
    assert ("in_few_sets" in step.work.variant.kernel) is crowds


@pytest.mark.parametrize("kernel", ["argmax", "linalg_vector_norm"])
def test_rows_that_no_kernel_sums_by_vectors_cost_each(kernel: str) -> None:
    found = across_s(reduced(f"{kernel}_across", 1000, 21), CORE, 1e-6)
    assert found == pytest.approx(1e-6 * (1000 / 10 + 21000 / 2000))
    assert across_s(reduced("sum_across", 1000, 21), CORE, 1e-6) == 0.0


def test_maps_of_a_transposed_operand_have_no_vectors() -> None:
    odd = across_s(mapped("add_across", 300, 437), CORE, 1e-6)
    assert odd == pytest.approx(1e-6 * 300 * 437 / 3700)
    stepped = across_s(mapped("mul_across_converted", 256, 1000), CORE, 1e-6)
    assert stepped == pytest.approx(1e-6 * 256_000 / 1350)
    for other in ("add", "mul_across_by_row", "softmax_backward_across"):
        assert across_s(mapped(other, 256, 1000), CORE, 1e-6) == 0.0


def test_cores_share_and_gpus_have_none() -> None:
    item, four = reduced("argmax_across", 64, 64), CORE.model_copy(update={"units": 4})
    assert across_s(item, four, 1e-6) == pytest.approx(across_s(item, CORE, 1e-6) / 4)
    assert across_s(item, device_zoo.device("h200"), 1e-6) == 0.0


@pytest.mark.parametrize(("call", "priced"), [
    (lambda x: x.cumsum(0), True), (lambda x: x.cumsum(1), False), (lambda x: x + x.t(), True),
    (lambda x: x.argmax(0), True), (lambda x: x.argmax(1), False), (lambda x: x.sum(0), False),
    (lambda x: x + x, False),
])  # fmt: skip
def test_a_network_says_what_lies_across(call: Any, *, priced: bool) -> None:
    class Called(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return call(x)

    (step,) = lower(capture(Called(), [torch.zeros(512, 512)], eager=True))
    assert isinstance(step.work, Program)
    assert (across_s(step.work, CORE, 1e-6) > 0) is priced
