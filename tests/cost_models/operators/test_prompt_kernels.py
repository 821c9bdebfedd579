"""What prompts' attention is bound by, against counts by hand from TensorRT-LLM's tiles."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from tests.cost_models.operator_rows import attention

from foreplan.cost_models.operators.prompt_kernels import (
    multiplies_narrow,
    prompt_s,
    takes_turns,
)
from foreplan.datasets import device_zoo


def seconds(
    b: int, queries: int, heads: int = 32, *, kv_heads: int = 8, device: str = "a100_sxm",
    window: int = 0, head_dim: int = 128, products: str = "bfloat16", cache: str = "bfloat16",
) -> float:  # fmt: skip
    rows = attention(
        b, queries, heads, kv_heads, queries=queries, device=device, window=window,
        head_dim=head_dim, products=products, cache=cache,
    )  # fmt: skip
    return float(prompt_s(*rows)[0])


def clock(device: str) -> float:
    found = device_zoo.device(device).clock_hz
    assert found is not None
    return found


def test_a_block_alone_waits_in_full() -> None:
    # 64 x 32 pairs of one head: 512 cycles of products and 128 of exponentials, 0.6 of it reached.
    cycles = 2 * 5400 + 4600 + (4 * 64 * 32 * 128 / (312e12 / 108 / 1.41e9) + 64 * 32 / 16) / 0.6
    assert seconds(1, 16, 1, kv_heads=1) * clock("a100_sxm") == pytest.approx(cycles, rel=0.01)


def test_products_and_exponentials_take_turns_but_on_hopper() -> None:
    # A pair of an A100's is 512 of 2,049 FLOP a cycle and one of 16 exponentials, of an H100's 512
    # of 3,786 FLOP beside the exponential.
    pairs = 32 * 16384 * 16385 / 2
    ampere = pairs * (512 / 2049 + 1 / 16) / 0.6 / 108 / clock("a100_sxm")
    assert ampere < seconds(1, 16384) < 1.15 * ampere  # blocks wait, and their turns are whole
    hopper = pairs * 512 / 3786 / 0.6 / 132 / clock("h100_sxm")
    assert hopper < seconds(1, 16384, device="h100_sxm") < 1.15 * hopper


def test_the_last_block_is_waited_for() -> None:
    # 32 heads of 1,024 queries are 512 blocks for 108 multiprocessors, one head's 16 are not.
    last = 64 * 1024 * (512 / 2049 + 1 / 16) / 0.6 / clock("a100_sxm")
    assert seconds(1, 1024, 1, kv_heads=1) > last


def test_small_heads_on_hopper_go_through_whole_sequences() -> None:
    small = partial(seconds, device="h100_sxm", head_dim=64)
    assert small(64, 256, window=128) == small(64, 256)
    assert small(64, 4096, window=128) < small(64, 4096) / 2


def test_products_of_8_bits_leave_the_exponentials() -> None:
    narrow = partial(seconds, products="fp8", cache="fp8")
    for device in ("l40s", "h100_sxm"):
        assert 0.49 < narrow(8, 16384, device=device) / seconds(8, 16384, device=device) < 0.7
    # Tiles of 128 x 128 for 16 queries of a small head.
    wide = narrow(256, 16, device="l40s", head_dim=64)
    assert wide > 2 * seconds(256, 16, device="l40s", head_dim=64)


def test_a_prompt_goes_through_memory_before_its_attention() -> None:
    _, work, _ = attention(64, 1024, 32, 8, queries=1024)
    operands = 64 * 1024 * 128 * 2 * (32 + 2 * 8)
    assert seconds(64, 1024) > 2 * operands / work.bandwidth[0]


def test_a_window_leaves_fewer_keys() -> None:
    assert seconds(8, 8192, window=128) < seconds(8, 8192) / 5


@pytest.mark.parametrize("device", ["t4", "a100_sxm", "l40s", "h100_sxm", "b200"])
def test_more_queries_take_no_less(device: str) -> None:
    for head_dim in (64, 128):
        times = [seconds(8, q, device=device, head_dim=head_dim) for q in range(8, 2049, 40)]
        assert np.all(np.diff(times) > -0.1 * np.array(times[:-1]))


def test_which_kernels_a_device_has() -> None:
    assert takes_turns(device_zoo.device("a100_sxm"))
    assert takes_turns(device_zoo.device("mi100"))
    assert not takes_turns(device_zoo.device("h200"))
    assert multiplies_narrow("fp8/fp8")
    assert not multiplies_narrow("bfloat16/fp8")
