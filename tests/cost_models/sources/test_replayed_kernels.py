"""Prices of the kernels that torch really runs, where passes are replayed from graphs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.cost_models.sources.predicted import PredictedSource
from foreplan.cost_models.sources.replayed_kernels import (
    attention_floor_s,
    cache_unpacking_s,
    kernels,
    replayed,
)
from foreplan.cost_models.unpacking import unpacking_floor_s
from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.program import Program, Variant, program

SWITCH_S = 0.9e-6
#: As a profile measures it: 4.15 TB/s of copies.
WHOLE = device_zoo.device("h200").model_copy(
    update={"name": "cuda:0", "memory_bandwidth": 4.15e12, "launch_overhead_s": 7e-6}
)
QUARTER = WHOLE.model_copy(update={"units": 33})
PLAIN = {
    "activation": "silu_mul", "add": "add", "norm": "rms_norm", "embedding": "embedding",
    "argmax": "argmax", "rope": "rope", "cache_write": "copy", "attention": "sdpa",
}  # fmt: skip


def torch_program(op: str, kernel: str = "", storage: str = "bf16", **dims: int) -> Program:
    return program(op, Variant(storage, "bf16", f"torch.{kernel or PLAIN[op]}"), **dims)


def seconds(item: Program, figures: Device = WHOLE) -> float:
    """Without the switch."""
    found = replayed(item, figures, SWITCH_S)
    assert found is not None
    assert found.low_s < found.mean_s < found.high_s
    return found.mean_s - SWITCH_S


def test_a_rotation_is_five_kernels_that_move_five_times_its_bytes() -> None:
    item = torch_program("rope", rows=8192, heads=40, head_dim=128)
    found = kernels(item)
    n = 8192 * 40 * 128
    assert [k.elements for k in found] == [n / 2, n, n, n, n]
    assert [k.strided for k in found] == [True] * 4 + [False]
    # n/2 read and written, three times n, and two read for one written.
    assert sum(k.bytes for k in found) == 2 * n * (1 + 3 * 2 + 3) == 5 * item.bytes
    assert seconds(item) == pytest.approx(469e-6, rel=0.05)  # measured there


def test_halves_of_a_row_are_walked_over_strides_and_bound_by_multiprocessors() -> None:
    many = torch_program("activation", rows=8192, cols=14336)
    one = torch_program("activation", rows=1, cols=14336)
    assert [k.strided for k in kernels(many)] == [True, True]
    assert [k.strided for k in kernels(one)] == [False, False]
    # 8192 x 14336 elements, twice, at 0.35 ns of one of 132 multiprocessors: 623 us.
    assert seconds(many) == pytest.approx(2 * (1.9e-6 + 8192 * 14336 * 0.35e-9 / 132))
    assert seconds(many, QUARTER) == pytest.approx(4 * seconds(many), rel=0.01)
    assert seconds(one) == pytest.approx(2 * 1.2e-6, rel=0.02)
    gelu = torch_program("activation", "gelu_tanh_mul", rows=8192, cols=14336)
    assert seconds(gelu) == seconds(many)


def test_what_is_dense_is_bound_by_memory_on_slices_too() -> None:
    item = torch_program("add", rows=8192, cols=4096)
    assert seconds(item) == pytest.approx(1.2e-6 + 3 * 2 * 8192 * 4096 / 4.15e12)
    assert seconds(item, QUARTER) == seconds(item)
    gelu = torch_program("activation", "gelu_tanh", rows=8192, cols=4096)
    assert seconds(gelu) == pytest.approx(1.2e-6 + 2 * 2 * 8192 * 4096 / 4.15e12)


def test_what_the_cache_holds_is_not_taken_from_memory() -> None:
    item = torch_program("add", rows=2048, cols=2048)
    assert seconds(item) == pytest.approx(1.2e-6 + item.bytes / (132 * 72e9))
    assert seconds(item) == pytest.approx(3.6e-6, rel=0.1)  # measured
    assert seconds(item, QUARTER) == pytest.approx(1.2e-6 + item.bytes / 4.15e12)
    unknown = WHOLE.model_copy(update={"l2_bytes": None})
    assert seconds(item, unknown) == pytest.approx(1.2e-6 + item.bytes / 4.15e12)


def test_a_norm_s_row_has_one_block_and_eight_rows_share_a_multiprocessor() -> None:
    first = seconds(torch_program("norm", rows=1, cols=4096))
    assert first == pytest.approx(1.2e-6 + 4096 * 0.78e-9)
    assert seconds(torch_program("norm", rows=8 * 33, cols=4096), QUARTER) == first
    two = seconds(torch_program("norm", rows=8 * 33 + 1, cols=4096), QUARTER)
    assert two == pytest.approx(first + 4096 * 0.78e-9)
    short = torch_program("norm", rows=65536, cols=128)  # of each head's queries
    assert seconds(short) == pytest.approx(41.3e-6, rel=0.05)  # measured


def test_an_arg_max_s_row_goes_through_one_block() -> None:
    few, more = (torch_program("argmax", rows=rows, cols=128256) for rows in (33, 34))
    assert seconds(few, QUARTER) == pytest.approx(1.2e-6 + 128256 * 0.21e-9)
    assert seconds(more, QUARTER) == pytest.approx(1.2e-6 + 2 * 128256 * 0.21e-9)
    assert seconds(more) == seconds(few)


def test_few_rows_are_gathered_one_after_another() -> None:
    sixteen = seconds(torch_program("embedding", rows=16, cols=2048))
    assert sixteen == pytest.approx(1.2e-6 + 16 * 0.39e-6)
    assert seconds(torch_program("embedding", rows=17, cols=2048)) < sixteen


def test_a_cache_is_written_by_two_kernels_and_in_8_bits_by_24() -> None:
    dims = {"batch": 16, "tokens": 1, "kv_heads": 8, "head_dim": 128}
    plain = torch_program("cache_write", **dims)
    eight = torch_program("cache_write", "quantise_copy", "int8", **dims)
    assert seconds(plain) == pytest.approx(3.8e-6, rel=0.05)
    assert len(kernels(eight)) == 24
    assert seconds(eight) == pytest.approx(24 * 1.2e-6 + 8 * 0.7e-6, rel=0.05)


def test_a_cache_of_8_bits_is_made_before_it_is_attended_to() -> None:
    dims = {"batch": 16, "queries": 1, "keys": 512, "heads": 32, "kv_heads": 8, "head_dim": 128}
    eight = torch_program("attention", "dequant_sdpa", "int8", **dims)
    plain = torch_program("attention", **dims)
    codes = 16 * 512 * 8 * 128
    # Keys and values: codes cast, scales cast, multiplied.
    whole = 2 * (3 * 1.9e-6 + (2 + 1 / 128) * codes * 0.35e-9 / 33)
    assert cache_unpacking_s(eight, QUARTER) == pytest.approx(whole)
    assert cache_unpacking_s(plain, QUARTER) is None
    source = PredictedSource(devices={"q": QUARTER}, switch_s={"q": SWITCH_S})
    one, other = (source.estimate(item, "q") for item in (eight, plain))
    assert one is not None
    assert other is not None
    floor_s = attention_floor_s(plain, QUARTER)
    assert other.mean_s >= floor_s
    assert one.mean_s >= whole + 0.5 * floor_s


def test_attention_of_one_query_takes_a_wave_of_blocks_after_another() -> None:
    dims = {"queries": 1, "keys": 543, "heads": 32, "kv_heads": 8, "head_dim": 128}
    one_s = 543 * (15.3e-9 + 128 * 0.075e-9)
    item = torch_program("attention", batch=16, **dims)
    assert attention_floor_s(item, QUARTER) == pytest.approx(1.2e-6 + 4 * one_s)  # 128 / 33
    assert attention_floor_s(item, WHOLE) == pytest.approx(1.2e-6 + one_s)
    assert attention_floor_s(item, WHOLE) == pytest.approx(14.7e-6, rel=0.02)  # measured there
    split = torch_program("attention", batch=3, **dims)  # 24 blocks of 33: keys are split
    assert attention_floor_s(split, QUARTER) == 0
    many = torch_program("attention", batch=16, **(dims | {"queries": 2}))
    assert attention_floor_s(many, QUARTER) == 0


def test_fused_products_of_few_rows_are_bound_by_memory_or_by_unpacking() -> None:
    item = program(
        "linear", Variant.parse("int8/bf16/foreplan.fragment_linear"), rows=8, n=8192, k=8192
    )
    fused_s = 1.8e-6 + 8192 * 0.19e-9
    assert seconds(item, QUARTER) == pytest.approx(fused_s + unpacking_floor_s(item, QUARTER))
    assert unpacking_floor_s(item, WHOLE) < item.bytes / 3.51e12
    reads = WHOLE.model_copy(update={"memory_bandwidth": 3.51e12})
    assert seconds(item, reads) == pytest.approx(19.2e-6, rel=0.2)  # measured, kernels.md
    many = program(
        "linear", Variant.parse("int8/bf16/foreplan.fragment_linear"), rows=512, n=8192, k=8192
    )
    assert replayed(many, WHOLE, SWITCH_S) is None


def test_products_of_few_rows_stream_their_weight_at_any_number_of_bits() -> None:
    reads = WHOLE.model_copy(update={"memory_bandwidth": 3.51e12})
    plain = Variant.parse("bf16/bf16/torch.linear")
    few, many = (program("linear", plain, rows=rows, n=8192, k=8192) for rows in (32, 33))
    assert seconds(few, reads) == pytest.approx(2.2e-6 + 1.6e-6 + few.bytes / 3.51e12)
    narrow = program("linear", plain, rows=8, n=2048, k=8192)  # few blocks, sums of their parts
    assert seconds(narrow, reads) == pytest.approx(2.2e-6 + 2 * 1.6e-6 + narrow.bytes / 3.51e12)
    assert replayed(many, reads, SWITCH_S) is None
    source = PredictedSource(
        devices={"d": WHOLE}, switch_s={"d": SWITCH_S}, read_bandwidth={"d": 5e12}
    )
    found = source.estimate(few, "d")
    assert found is not None
    assert found.mean_s == pytest.approx(3.8e-6 + few.bytes / 5e12 + SWITCH_S)


def test_no_launch_by_a_host_is_part_of_a_price() -> None:
    """As read off the kernels, and as learnt from operators timed inside CUDA graphs."""
    replays = PredictedSource(devices={"d": WHOLE}, switch_s={"d": SWITCH_S})
    learnt = PredictedSource(devices={"d": WHOLE})
    for item in (
        torch_program("add", rows=4, cols=2048), torch_program("norm", rows=4, cols=2048),
    ):  # fmt: skip
        known, alone = (source.estimate(item, "d") for source in (replays, learnt))
        assert known is not None
        assert alone is not None
        assert known.mean_s < 4.5e-6
        assert alone.mean_s < 4.6e-6
        assert known.source == alone.source == "predicted"
        assert known != alone


def test_other_programs_and_chips_are_not_known() -> None:
    item = torch_program("add", rows=4, cols=2048)
    other = device_zoo.device("a100_sxm_80gb")
    assert replayed(item, other, SWITCH_S) is None
    attended = torch_program(
        "attention", "dequant_sdpa", "int8", batch=64, queries=1, keys=64, heads=8, kv_heads=8,
        head_dim=64,
    )  # fmt: skip
    assert replayed(attended, WHOLE, SWITCH_S) is None
    assert cache_unpacking_s(attended, other) is None
    assert attention_floor_s(attended, other) == 0
    for figures in ({"units": None}, {"memory_bandwidth": None}):
        assert replayed(item, WHOLE.model_copy(update=figures), SWITCH_S) is None


@given(st.sampled_from(["add", "norm", "activation", "argmax"]), st.integers(1, 9000),
       st.integers(1, 9000), st.integers(1, 132))  # fmt: skip
def test_more_rows_and_fewer_multiprocessors_are_never_faster(
    op: str, rows: int, cols: int, units: int
) -> None:
    part = WHOLE.model_copy(update={"units": units})
    item, more = (torch_program(op, rows=n, cols=cols) for n in (rows, 2 * rows))
    assert seconds(item, part) >= seconds(item) * (1 - 1e-12)
    assert seconds(more, part) >= seconds(item, part) * (1 - 1e-12)
