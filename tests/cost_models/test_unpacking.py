"""Kernels that write a quantised weight out before they multiply."""

import pytest

from foreplan.cost_models.roofline import FACTOR, RooflineSource
from foreplan.cost_models.sources.predicted import PredictedSource
from foreplan.cost_models.unpacking import (
    unpacked_weights,
    unpacking_bytes,
    unpacking_floor_s,
    writing_s,
)
from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.kernels.registry import FEW_ROWS, kernels_for
from foreplan.datasets.kernels.row_shapes import MOST_ROWS
from foreplan.datasets.operators import ATTENTIONS
from foreplan.datasets.program import Program, Variant, program

FUSED, SLOW = "int8/bf16/foreplan.fragment_linear", "int8/bf16/torch.dequant_linear"
FOUR = "int4/bf16/foreplan.fragment_linear"


def linear(variant: str, rows: int = 16) -> Program:
    return program("linear", Variant.parse(variant), rows=rows, n=512, k=256)


def test_only_kernels_that_unpack_write_weights_out() -> None:
    assert unpacked_weights(linear(FUSED)) == 0
    assert unpacked_weights(linear(SLOW)) == 512 * 256
    assert unpacked_weights(linear(FUSED, FEW_ROWS)) == 0
    assert unpacked_weights(linear(FUSED, FEW_ROWS + 1)) == 512 * 256
    assert unpacking_bytes(linear(SLOW)) == 2 * 2 * 512 * 256  # written and read in bf16
    assert unpacking_bytes(linear("int3/fp32/torch.dequant_linear")) == 2 * 4 * 512 * 256


@pytest.mark.parametrize(
    ("n", "k", "measured_s"),
    [(1024, 1024, 24.4e-6), (2048, 2048, 46.9e-6), (2048, 8192, 157e-6), (16384, 2048, 363e-6)],
)
def test_values_unpacked_one_operator_after_another(n: int, k: int, measured_s: float) -> None:
    """One row on an H200, docs/results/h200.md."""
    h200 = device_zoo.device("h200")
    item = program("linear", Variant.parse("int4/bf16/torch.dequant_linear"), rows=1, n=n, k=k)
    assert predicted(item, h200) == pytest.approx(measured_s, rel=0.25)
    assert writing_s(item, device_zoo.device("a100_sxm")) is None


def test_blocks_for_tens_of_rows_write_nothing_out() -> None:
    h200, a100 = device_zoo.device("h200"), device_zoo.device("a100_sxm")
    tens = linear(FUSED, FEW_ROWS + 1)
    assert unpacked_weights(tens, h200) == unpacking_bytes(tens, h200) == 0
    assert unpacked_weights(tens, a100) == unpacked_weights(tens) == 512 * 256
    assert writing_s(tens, h200) is None
    assert unpacked_weights(linear(FUSED, MOST_ROWS + 1), h200) == 512 * 256
    of_experts = linear(FUSED.replace("fragment", "grouped_fragment"), FEW_ROWS + 1)
    assert unpacked_weights(of_experts, h200) == 512 * 256


@pytest.mark.parametrize(
    ("variant", "rows", "measured_s"),
    [(FOUR, 64, 36.0e-6), (FOUR, 128, 47.8e-6), (FOUR, 256, 71.0e-6), (FUSED, 64, 40.1e-6),
     (FUSED, 256, 67.0e-6)],
)  # fmt: skip
def test_tens_of_rows_take_what_their_blocks_take(
    variant: str, rows: int, measured_s: float
) -> None:
    """On an H200, docs/results/kernels.md."""
    h200 = device_zoo.device("h200")
    item = program("linear", Variant.parse(variant), rows=rows, n=8192, k=8192)
    assert unpacking_floor_s(item, h200) == pytest.approx(measured_s, rel=0.16)
    assert predicted(item, h200) >= unpacking_floor_s(item, h200)
    part = h200.model_copy(update={"units": 33})
    assert unpacking_floor_s(item, part) > 3.5 * unpacking_floor_s(item, h200)


@pytest.mark.parametrize("op", sorted(ATTENTIONS))
def test_a_quantised_cache_is_written_out_too(op: str) -> None:
    dims = {"batch": 2, "queries": 1, "keys": 30, "heads": 8, "kv_heads": 4, "head_dim": 16}
    kernels = {v.storage: v for v in kernels_for(op, "cuda") if v.compute == "bf16"}
    eight, plain = (program(op, kernels[storage], **dims) for storage in ("int8", "bf16"))
    assert unpacked_weights(eight) == 2 * 2 * 30 * 4 * 16
    assert unpacked_weights(plain) == 0
    source, figures = RooflineSource(device_zoo.device("h200")), device_zoo.device("h200")
    priced = [source.estimate(item, "h200") for item in (eight, plain)]
    assert priced[0] is not None
    assert priced[1] is not None
    assert figures.memory_bandwidth is not None
    moved = eight.bytes + unpacking_bytes(eight) - plain.bytes
    assert moved > 0  # it takes longer than a plain cache, in less memory
    assert priced[0].mean_s - priced[1].mean_s == pytest.approx(
        FACTOR[1] * moved / figures.memory_bandwidth, rel=1e-6
    )


@pytest.mark.parametrize("rows", [1, FEW_ROWS])
def test_the_roofline_counts_what_is_written_out(rows: int) -> None:
    figures = device_zoo.device("h200")
    source = RooflineSource(figures)
    slow, fused = (source.estimate(linear(v, rows), "h200") for v in (SLOW, FUSED))
    assert slow is not None
    assert fused is not None
    assert figures.memory_bandwidth is not None
    extra = FACTOR[1] * unpacking_bytes(linear(SLOW)) / figures.memory_bandwidth
    assert slow.mean_s - fused.mean_s == pytest.approx(extra)


def test_predictions_count_it_too() -> None:
    source = PredictedSource()
    slow, fused = (source.estimate(linear(v), "h200") for v in (SLOW, FUSED))
    assert slow is not None
    assert fused is not None
    assert slow.source == fused.source == "predicted"
    assert slow.low_s > fused.low_s
    assert slow.mean_s > fused.mean_s


def test_few_multiprocessors_are_bound_by_unpacking_in_registers() -> None:
    whole = device_zoo.device("h200")
    part = whole.model_copy(update={"units": 33})
    item = program("linear", Variant.parse(FUSED), rows=16, n=8192, k=8192)
    assert unpacking_floor_s(item, part) == pytest.approx(4 * unpacking_floor_s(item, whole))
    assert predicted(item, part) == pytest.approx(unpacking_floor_s(item, part))
    older = part.model_copy(update={"compute_capability": "8.0"})
    one, two = (unpacking_floor_s(linear(FUSED, rows), part) for rows in (32, 8))
    assert unpacking_floor_s(linear(FUSED, 40), older) == pytest.approx(one + two)
    assert unpacking_floor_s(linear(FUSED, FEW_ROWS + 1), older) == 0


def test_other_kernels_and_chips_are_not_bound_by_it() -> None:
    h200, l4 = device_zoo.device("h200"), device_zoo.device("l4")
    assert unpacking_floor_s(linear(SLOW), h200) == 0
    assert unpacking_floor_s(linear("bf16/bf16/torch.linear"), h200) == 0
    assert unpacking_floor_s(linear(FUSED, MOST_ROWS + 1), h200) == 0
    assert unpacking_floor_s(linear(FUSED), l4) == 0  # never measured there


def predicted(item: Program, device: Device) -> float:
    estimate = PredictedSource(devices={"part": device}).estimate(item, "part")
    assert estimate is not None
    assert estimate.low_s <= estimate.mean_s <= estimate.high_s
    return estimate.mean_s


def test_many_rows_are_a_product_in_bf16_and_the_time_of_writing_out() -> None:
    whole = device_zoo.device("h200")
    for units in (132, 33):
        figures = whole.model_copy(update={"units": units})
        plain, four, eight = (
            predicted(program("linear", Variant.parse(v), rows=512, n=4096, k=14336), figures)
            for v in ("bf16/bf16/torch.linear", "int4/bf16/foreplan.fragment_linear", FUSED)
        )
        assert four - plain == pytest.approx(63e-6 * 132 / units, rel=0.01)
        assert eight - plain == pytest.approx(59e-6 * 132 / units, rel=0.01)
    elsewhere = device_zoo.device("h100").model_copy(update={"chip": "other"})
    item = program("linear", Variant.parse(FUSED), rows=512, n=4096, k=14336)
    assert writing_s(item, elsewhere) is None
    assert unpacking_floor_s(item, whole) == 0.0
