"""Which kernel decodes, and what it is bound by: rules of TensorRT-LLM's source, counts by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.cost_models.operators.decoding_kernels import by_head, decoding_s
from foreplan.cost_models.operators.operator_work import OperatorWork, operator_work
from foreplan.cost_models.operators.prompt_kernels import prompt_s
from foreplan.datasets import device_zoo
from foreplan.datasets.sweeps.operator_table import OperatorTable, operator_table, texts

Offer = dict[str, "np.ndarray[tuple[int], np.dtype[np.float64]]"]


def attention(
    b: int, keys: int, heads: int, kv_heads: int, *, device: str = "a100_sxm",
    cache: str = "bfloat16", queries: int = 1, window: int = 0,
) -> tuple[OperatorTable, OperatorWork, Offer]:  # fmt: skip
    size = {
        "b": b, "queries": queries, "keys": keys, "heads": heads, "kv_heads": kv_heads,
        "head_dim": 128, "window": window,
    }  # fmt: skip
    kind = "generation_attention" if queries == 1 else "context_attention"
    table = operator_table(
        op=texts([kind]), kind=texts([kind]), dtype=texts([f"bfloat16/{cache}"]),
        library=texts(["trtllm"]), device=texts([device]),
        dims={name: np.array([float(value)]) for name, value in size.items()},
        latency_s=np.array([np.nan]),
    )  # fmt: skip
    found = device_zoo.device(device)
    nan = float("nan")
    offer = {
        "l2": np.array([float(found.l2_bytes or nan)]),
        "clock": np.array([float(found.clock_hz or nan)]),
        "capability": np.array([float(found.compute_capability or nan)]),
    }
    return table, operator_work(table), offer


def alone(*sizes: int, device: str = "a100_sxm", cache: str = "bfloat16") -> bool:
    return bool(by_head(*attention(*sizes, device=device, cache=cache))[0])


def seconds(*sizes: int, device: str = "a100_sxm", cache: str = "bfloat16") -> float:
    return float(decoding_s(*attention(*sizes, device=device, cache=cache))[0])


def test_a_cache_is_shared_by_2_to_32_heads() -> None:
    assert alone(64, 4096, 8, 8)
    assert not alone(64, 4096, 16, 8)
    assert not alone(64, 4096, 32, 1)
    assert alone(64, 4096, 64, 1)


def test_blocks_are_to_be_enough_for_a_quarter_of_the_multiprocessors() -> None:
    # An A100 has 108 multiprocessors, an H100 132, an L40S 142.
    assert not alone(27, 1, 8, 1)
    assert alone(26, 1, 8, 1)
    assert not alone(1, 27 * 128, 8, 1)  # blocks of 128 tokens
    assert alone(1, 27 * 128 - 1, 8, 1)
    assert alone(1, 27 * 128, 8, 1, device="h100_sxm")


def test_caches_of_8_bits_are_cut_on_hopper_alone() -> None:
    assert not alone(1, 8192, 32, 8, device="h100_sxm", cache="fp8")
    assert alone(1, 8192, 32, 8, device="l40s", cache="fp8")
    assert not alone(8, 8192, 32, 8, device="l40s", cache="fp8")


def test_a_large_shared_cache_is_read_once() -> None:
    # 4.3 GB of keys, with values in their place, at 0.85 of the bandwidth.
    table, work, offer = attention(256, 8192, 64, 8)
    keys = 256 * 8192 * 8 * 128 * 2
    assert decoding_s(table, work, offer)[0] == pytest.approx(
        keys / (0.85 * work.bandwidth[0]), rel=0.02
    )


def test_by_head_a_number_takes_cycles_whatever_the_cache_holds() -> None:
    # 64 heads of one cache: 64 times the numbers, all of them in L2.
    cycles = 16 * 64 * (2600 + 2 * 128 * 2048 / 13) / 108
    clock = device_zoo.device("a100_sxm").clock_hz
    assert clock is not None
    assert seconds(16, 2048, 64, 1) == pytest.approx(cycles / clock, rel=1e-6)


@given(
    b=st.integers(1, 512), keys=st.integers(1, 1 << 16), group=st.sampled_from((1, 4, 16, 64)),
    device=st.sampled_from(("a100_sxm", "h100_sxm", "l40s")),
    cache=st.sampled_from(("bfloat16", "fp8")),
)  # fmt: skip
def test_decoding_takes_time(b: int, keys: int, group: int, device: str, cache: str) -> None:
    found = seconds(b, keys, 2 * group, 2, device=device, cache=cache)
    assert np.isfinite(found)
    assert found > 0


def test_short_prompts_are_bound_by_cycles_of_blocks() -> None:
    # 32 heads of 128 and 16 queries each, on two chips with unlike matrix units.
    table, work, offer = attention(512, 16, 32, 8, queries=16)
    ampere = prompt_s(table, work, offer)[0] * offer["clock"][0] * work.units[0]
    table, work, offer = attention(512, 16, 32, 8, queries=16, device="h100_sxm")
    hopper = prompt_s(table, work, offer)[0] * offer["clock"][0] * work.units[0]
    assert ampere == pytest.approx(hopper, rel=0.35)
    assert min(ampere, hopper) > 512 * 32 * 38 * 128


def test_a_prompt_goes_through_memory_before_its_attention() -> None:
    table, work, offer = attention(64, 1024, 32, 8, queries=1024)
    operands = 64 * 1024 * 128 * 2 * (32 + 2 * 8)
    assert prompt_s(table, work, offer)[0] > 2 * operands / work.bandwidth[0]


def test_a_window_leaves_fewer_keys() -> None:
    whole = prompt_s(*attention(8, 8192, 32, 8, queries=8192))[0]
    assert prompt_s(*attention(8, 8192, 32, 8, queries=8192, window=128))[0] < whole / 5
