"""Which kernel decodes, and what it is bound by: rules of TensorRT-LLM's source, counts by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cost_models.operator_rows import attention

from foreplan.cost_models.operators.decoding_kernels import by_head, decoding_s
from foreplan.datasets import device_zoo


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


def test_a_block_by_head_alone_takes_as_long_as_those_that_run_at_once() -> None:
    # An A100 holds 432 blocks: until then more heads take no longer, and twice as many twice so.
    one = seconds(1, 64, 1, 1)
    assert seconds(432, 64, 1, 1) == pytest.approx(one)
    assert seconds(864, 64, 1, 1) == pytest.approx(2 * one)


def test_long_caches_by_head_are_cut_where_few_blocks_run() -> None:
    # 8 heads on 108 multiprocessors: 13 pieces each.
    assert seconds(1, 16384, 8, 8) < seconds(1, 16384, 72, 72) / 5


def test_numbers_of_8_bits_are_widened_before_hopper() -> None:
    # By head, all of it in L2: 3 conversions of 16 a cycle for 13 numbers a cycle.
    sizes = (64, 256, 64, 1)
    assert seconds(*sizes, device="h100_sxm", cache="fp8") == seconds(*sizes, device="h100_sxm")
    read = 2 * 128 * 256
    more = read * (3 / 16 - 1 / 13) / (2600 + read / 13)
    assert seconds(*sizes, device="l40s", cache="fp8") == pytest.approx(
        (1 + more) * seconds(*sizes, device="l40s")
    )


@pytest.mark.parametrize(("heads", "held"), [(16, 3), (128, 3), (256, 2)])
def test_hopper_holds_blocks_of_8_bit_caches(heads: int, held: int) -> None:
    # 2, 16 and 32 heads of a cache, in eights, of 128 numbers each: 1,024, 2,048 and 4,096.
    table, work, offer = attention(2048, 1, heads, 8, device="h100_sxm", cache="fp8")
    cycles = decoding_s(table, work, offer)[0] * offer["clock"][0] * 132 / (2048 * 8)
    assert cycles == pytest.approx(8500 / held, rel=0.01)


@given(
    b=st.integers(1, 512), keys=st.integers(1, 1 << 16), group=st.sampled_from((1, 4, 16, 64)),
    device=st.sampled_from(("a100_sxm", "h100_sxm", "l40s")),
    cache=st.sampled_from(("bfloat16", "fp8")),
)  # fmt: skip
def test_decoding_takes_time(b: int, keys: int, group: int, device: str, cache: str) -> None:
    found = seconds(b, keys, 2 * group, 2, device=device, cache=cache)
    assert np.isfinite(found)
    assert found > 0
