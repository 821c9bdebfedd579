"""Prices of the kernels that torch really runs, where passes are replayed from graphs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.cost_models.sources.predicted import PredictedSource
from foreplan.cost_models.sources.replayed_kernels import (
    attention_floor_s,
    cache_unpacking_s,
    kernels,
    recorded_share,
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


@pytest.mark.parametrize(
    ("op", "kernel", "dims", "measured_s"),
    [
        ("rope", "rope", {"rows": 8, "heads": 40, "head_dim": 128}, 1.67e-6),
        ("rope", "rope", {"rows": 2048, "heads": 40, "head_dim": 64}, 4.72e-6),
        ("rope", "rope", {"rows": 8192, "heads": 72, "head_dim": 128}, 75.9e-6),
        ("activation", "silu_mul", {"rows": 8, "cols": 14336}, 1.83e-6),
        ("activation", "gelu_tanh_mul", {"rows": 512, "cols": 8192}, 6.3e-6),
        ("activation", "silu_mul", {"rows": 8192, "cols": 14336}, 163e-6),
        ("norm", "rms_norm", {"rows": 8, "cols": 4096}, 2.12e-6),
        ("norm", "rms_norm", {"rows": 512, "cols": 4096}, 3.84e-6),
        ("norm", "rms_norm", {"rows": 8192, "cols": 5120}, 42.6e-6),
    ],
)
def test_maps_of_rows_are_one_launch(
    op: str, kernel: str, dims: dict[str, int], measured_s: float
) -> None:
    """`tests/benchmarks/row_maps_cuda.py` on a whole H200."""
    item = torch_program(op, kernel, **dims)
    assert len(kernels(item)) == 1
    assert seconds(item) == pytest.approx(measured_s, rel=0.15)


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


def test_a_layer_norm_s_row_has_one_block_and_eight_rows_share_a_multiprocessor() -> None:
    first = seconds(torch_program("norm", "layer_norm", rows=1, cols=4096))
    assert first == pytest.approx(1.2e-6 + 4096 * 0.78e-9)
    eight = torch_program("norm", "layer_norm", rows=8 * 33, cols=4096)
    assert seconds(eight, QUARTER) == first
    two = seconds(torch_program("norm", "layer_norm", rows=8 * 33 + 1, cols=4096), QUARTER)
    assert two == pytest.approx(first + 4096 * 0.78e-9)
    short = torch_program("norm", "layer_norm", rows=65536, cols=128)
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


def test_a_cache_is_written_by_one_kernel_which_multiprocessors_bound_where_it_rounds() -> None:
    few = {"batch": 8, "tokens": 1, "kv_heads": 8, "head_dim": 128}
    many = few | {"tokens": 1024}
    for dims, plain_s, eight_s in ((few, 1.54e-6, 1.97e-6), (many, 19.4e-6, 32.3e-6)):
        plain = torch_program("cache_write", **dims)
        eight = torch_program("cache_write", "quantise_copy", "int8", **dims)
        assert len(kernels(plain)) == len(kernels(eight)) == 1
        assert seconds(plain) == pytest.approx(plain_s, rel=0.15)  # measured
        assert seconds(eight) == pytest.approx(eight_s, rel=0.15)
    rounded = torch_program("cache_write", "quantise_copy", "int8", **many)
    assert seconds(rounded, QUARTER) > 3 * seconds(rounded)


@pytest.mark.parametrize(
    ("storage", "batch", "heads", "kv_heads", "features", "keys", "measured_s"),
    [
        ("bf16", 8, 32, 8, 128, 288, 8.8e-6), ("bf16", 1, 32, 8, 128, 4096, 12.4e-6),
        ("bf16", 32, 32, 32, 128, 2048, 248e-6), ("bf16", 1, 16, 8, 256, 32768, 71e-6),
        ("int8", 8, 32, 8, 128, 288, 7.1e-6), ("int8", 32, 32, 8, 128, 2048, 39.6e-6),
        ("int8", 8, 8, 4, 256, 4096, 32.9e-6), ("int8", 64, 16, 2, 128, 288, 8.2e-6),
    ],
)  # fmt: skip
def test_attention_of_one_token_is_one_kernel(
    storage: str, batch: int, heads: int, kv_heads: int, features: int, keys: int, measured_s: float
) -> None:
    """`tests/benchmarks/token_attention_cuda.py` on a whole H200."""
    kernel = "sdpa" if storage == "bf16" else "dequant_sdpa"
    dims = {"batch": batch, "queries": 1, "keys": keys, "heads": heads, "kv_heads": kv_heads}
    item = torch_program("attention", kernel, storage, head_dim=features, **dims)
    assert seconds(item) == pytest.approx(measured_s, rel=0.25)
    assert seconds(item, QUARTER) >= seconds(item)
    wide = torch_program("attention", kernel, storage, head_dim=80, **dims)  # torch's own
    assert replayed(wide, WHOLE, SWITCH_S) is None


def test_a_cache_of_8_bits_is_made_before_a_prompt_attends_to_it() -> None:
    dims = {"batch": 16, "queries": 512, "keys": 512, "heads": 32, "kv_heads": 8, "head_dim": 128}
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
    assert one.mean_s == pytest.approx(other.mean_s + whole, rel=0.02)


def test_a_token_reads_a_cache_of_8_bits_as_it_lies() -> None:
    dims = {"batch": 32, "queries": 1, "keys": 2048, "heads": 32, "kv_heads": 8, "head_dim": 128}
    source = PredictedSource(devices={"d": WHOLE}, switch_s={"d": SWITCH_S})
    eight, plain = (
        source.estimate(torch_program("attention", kernel, storage, **dims), "d")
        for kernel, storage in (("dequant_sdpa", "int8"), ("sdpa", "bf16"))
    )
    assert eight is not None
    assert plain is not None
    assert eight.mean_s < 0.75 * plain.mean_s


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


@pytest.mark.parametrize(
    ("rows", "n", "k", "measured_s"),
    [(256, 2048, 2048, 6.4e-6), (1024, 5120, 2048, 30.6e-6), (4096, 2048, 8192, 170e-6)],
)
def test_a_product_of_many_rows_reads_what_was_just_written(
    rows: int, n: int, k: int, measured_s: float
) -> None:
    """Profiled behind other products on a whole H200."""
    item = program("linear", Variant.parse("bf16/bf16/torch.linear"), rows=rows, n=n, k=k)
    source = PredictedSource(devices={"d": WHOLE}, switch_s={"d": SWITCH_S})
    found = source.estimate(item, "d")
    assert found is not None
    assert found.mean_s == pytest.approx(measured_s, rel=0.15)
    few = program("linear", Variant.parse("bf16/bf16/torch.linear"), rows=32, n=n, k=k)
    fused = program(
        "linear", Variant.parse("int8/bf16/foreplan.fragment_linear"), rows=rows, n=n, k=k
    )
    assert recorded_share(few, WHOLE) == recorded_share(fused, WHOLE) == 1.0
    assert recorded_share(item, device_zoo.device("a100_sxm_80gb")) == 1.0


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
        "attention", "dequant_sdpa", "int8", batch=64, queries=2, keys=64, heads=8, kv_heads=8,
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
