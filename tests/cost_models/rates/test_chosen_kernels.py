"""What processors take for kernels that a call's numbers or indices choose."""

from __future__ import annotations

import pytest

from foreplan.cost_models.rates.chosen_kernels import chosen_kernel_s
from foreplan.cost_models.rates.slow_functions import function_s
from foreplan.datasets.device import Device
from foreplan.datasets.program import Program, Variant, program

CORE = Device(
    name="cpu:threads=1", chip="new", vendor="test", kind="cpu", isa=("avx2",),
    peak_flops={"fp32/vector": 1e11}, memory_bandwidth=2e10, launch_overhead_s=1e-6,
)  # fmt: skip


def mapped(kernel: str, inputs: int = 1) -> Program:
    variant = Variant("fp32", "fp32", f"torch.{kernel}")
    return program("elementwise", variant, rows=100, cols=50, inputs=inputs)


@pytest.mark.parametrize(
    ("kernel", "elements"),
    [
        ("pow_by_logarithms", 670), ("pow_of_fourths", 670), ("pow_of_exponents", 670),
        ("pow_of_roots_apart", 3200), ("gather_of_places", 1050), ("gather_of_rows", 11000),
        ("bucketize_in_many", 21), ("pad_reflected_backward", 780),
        ("mul_narrow_by_row", 5000), ("backward_narrow_by_row", 5000),
    ],
)  # fmt: skip
def test_elements_cost_by_what_chose_their_kernel(kernel: str, elements: int) -> None:
    item = mapped(kernel)
    assert chosen_kernel_s(item, CORE, 1e-6) == pytest.approx(1e-6 * 5000 / elements)
    assert function_s(item, CORE, 1e-6) == 0.0


def test_plain_kernels_cost_what_they_do_as_functions() -> None:
    for plain in ("pow", "mul", "mul_by_row", "gather", "pad", "pad_reflected", "bucketize"):
        assert chosen_kernel_s(mapped(plain), CORE, 1e-6) == 0.0
    assert function_s(mapped("gather"), CORE, 1e-6) == pytest.approx(1e-6)


def test_rows_that_are_added_up_cost_each_beside_their_elements() -> None:
    # Three times as many rows are written as there are.
    rows = chosen_kernel_s(mapped("scatter_add_of_rows", 4), CORE, 1e-6)
    assert rows == pytest.approx(1e-6 * 300 / 165)
    assert chosen_kernel_s(mapped("index_add", 4), CORE, 1e-6) == rows
    by_place = chosen_kernel_s(mapped("scatter_add__of_places", 4), CORE, 1e-6)
    assert by_place == pytest.approx(1e-6 * 15000 / 950)
    # Cleared before, and the largest kept.
    largest = chosen_kernel_s(mapped("scatter_reduce_of_largest_alone_of_places"), CORE, 1e-6)
    assert largest == pytest.approx(1e-6 * 5000 * (1 / 870 + 1 / 400 + 1 / 310))


def test_gpus_have_figures_of_their_own() -> None:
    gpu = CORE.model_copy(update={"kind": "cuda"})
    assert chosen_kernel_s(mapped("pow_by_logarithms"), gpu, 1e-6) == 0.0
