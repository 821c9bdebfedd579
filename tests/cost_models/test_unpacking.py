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
from foreplan.datasets.operators import ATTENTIONS
from foreplan.datasets.program import Program, Variant, program

FUSED, SLOW = "int8/bf16/foreplan.fragment_linear", "int8/bf16/torch.dequant_linear"


def linear(variant: str, rows: int = 16) -> Program:
    return program("linear", Variant.parse(variant), rows=rows, n=512, k=256)


def test_only_kernels_that_unpack_write_weights_out() -> None:
    assert unpacked_weights(linear(FUSED)) == 0
    assert unpacked_weights(linear(SLOW)) == 512 * 256
    assert unpacked_weights(linear(FUSED, FEW_ROWS)) == 0
    assert unpacked_weights(linear(FUSED, FEW_ROWS + 1)) == 512 * 256
    assert unpacking_bytes(linear(SLOW)) == 2 * 2 * 512 * 256  # written and read in bf16
    assert unpacking_bytes(linear("int3/fp32/torch.dequant_linear")) == 2 * 4 * 512 * 256


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
    twice = program("linear", Variant.parse(FUSED), rows=40, n=8192, k=8192)
    one, two = (unpacking_floor_s(linear(FUSED, rows), part) for rows in (32, 8))
    assert unpacking_floor_s(linear(FUSED, 40), part) == pytest.approx(one + two)
    assert unpacking_floor_s(twice, part) > unpacking_floor_s(item, part)


def test_other_kernels_and_chips_are_not_bound_by_it() -> None:
    h200, l4 = device_zoo.device("h200"), device_zoo.device("l4")
    assert unpacking_floor_s(linear(SLOW), h200) == 0
    assert unpacking_floor_s(linear("bf16/bf16/torch.linear"), h200) == 0
    assert unpacking_floor_s(linear(FUSED, FEW_ROWS + 1), h200) == 0
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
