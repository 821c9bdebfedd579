"""Gradients by tables of narrow rows."""

from __future__ import annotations

import math

import pytest

from foreplan.cost_models.rates.known_rates import KnownRates
from foreplan.cost_models.rates.table_gradients import table_gradient_s
from foreplan.datasets.device import Device
from foreplan.datasets.program import Program, Variant, program

CORE = Device(
    name="cpu:threads=1", chip="new", vendor="test", kind="cpu", isa=("avx2",),
    peak_flops={"fp32/vector": 1e11}, memory_bandwidth=2e10, launch_overhead_s=1e-6,
)  # fmt: skip


def gradient(kernel: str, cols: int = 50, dtype: str = "fp32") -> Program:
    variant = Variant(dtype, dtype, f"torch.{kernel}")
    return program("embedding_backward", variant, rows=1024, vocab=20000, cols=cols)


@pytest.mark.parametrize(
    ("kernel", "each"),
    [
        ("embedding", 0.04 + 50 * 0.00013), ("embedding_bag", 0.005 * 10 + 50 * 0.0001),
        ("embedding_bag_of_largest", 50 * 0.0035), ("index", 0.008 + 50 * 0.0004),
    ],
)  # fmt: skip
def test_rows_and_zeros_cost_beside_a_few_calls(kernel: str, each: float) -> None:
    # 40 us for zeros of a million elements.
    expected = 1e-6 * (4 + 1024 * each + 40)
    assert table_gradient_s(gradient(kernel), CORE, 1e-6) == pytest.approx(expected)
    assert KnownRates.load().seconds([gradient(kernel)], CORE) == pytest.approx(expected)


def test_wide_rows_and_other_types_go_by_what_profiles_timed() -> None:
    for other in (gradient("embedding", cols=256), gradient("embedding", dtype="bf16"),
                  gradient("take")):  # fmt: skip
        assert table_gradient_s(other, CORE, 1e-6) is None
    gpu = CORE.model_copy(update={"kind": "cuda"})
    assert table_gradient_s(gradient("embedding"), gpu, 1e-6) is None
    assert math.isfinite(KnownRates.load().seconds([gradient("embedding", 256)], CORE)[0])
