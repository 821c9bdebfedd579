"""Prices of fused updates: many small tensors take longer than one of as many elements."""

from __future__ import annotations

from foreplan.cost_models.predictor import Predictor
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.sweeps.update_packing import packed_update


def update(sizes: list[int]) -> Program:
    packed = packed_update(sizes)
    return program(
        "adamw", Variant("bf16", "bf16", "torch.adamw"), parameters=sum(sizes),
        kernels=packed.kernels, longest=packed.longest,
    )  # fmt: skip


def test_many_small_tensors_take_longer_than_one() -> None:
    few, many, bits = update([1 << 21]), update([1 << 12] * 512), update([1 << 10] * 2048)
    one, several, most = (
        price.mean_s for price in Predictor.load().predict([few, many, bits], "h200")
    )
    # 15 and 57 kernels of 36 tensors, of 2.4 us and more each (measured, at rates that leave values
    # as they are; at a rate of 0 it was 3).
    assert several > 15 * 2.4e-6
    assert 57 * 2.4e-6 < most < 57 * 4e-6
    assert one < several < most


def test_a_large_update_moves_its_bytes() -> None:
    sizes = [1 << 24] * 40
    price = Predictor.load().predict([update(sizes)], "h200")[0].mean_s
    # 14 bytes an element at half of the memory's bandwidth and more.
    assert 14 * sum(sizes) / 4.8e12 < price < 14 * sum(sizes) / 2.0e12
