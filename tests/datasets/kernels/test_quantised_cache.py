"""A cache of 8 bits: how far off what is read back may be, and what that does not depend on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foreplan.datasets.dtypes import cache_bytes
from foreplan.datasets.kernels.quantised_cache import QuantisedCache
from foreplan.datasets.kernels.registry import function
from foreplan.datasets.kernels.runnable import Inputs
from foreplan.datasets.program import Variant, program

FP32 = Variant("int8", "fp32", "torch.dequant_sdpa")
CPU = torch.device("cpu")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(
    seed=st.integers(0, 1 << 20), tokens=st.integers(1, 6), width=st.integers(1, 40),
    power=st.integers(-30, 30),
)  # fmt: skip
def test_what_is_read_back_is_within_half_a_step(seed, tokens, width, power):
    x = drawn(2, tokens, width, seed=seed) * 2.0**power
    cache = QuantisedCache.of(x)
    error = (cache.read(tokens, torch.float32) - x).abs()
    # bf16 may round the scale down by 2^-9, which costs the largest of a head up to half a step.
    assert (error <= 0.5001 * cache.scale.float()).all()
    assert (cache.scale.float() <= x.abs().amax(-1, keepdim=True) / 127 * (1 + 2**-8)).all()


def test_zeros_stay_zero_and_one_outlier_spoils_no_other_token():
    x = drawn(1, 3, 4, 8)
    x[:, :, 1] = 0
    plain = QuantisedCache.of(x).read(4, torch.float32)
    assert (plain[:, :, 1] == 0).all()
    x[0, 0, 2, 0] = 1e6
    spoilt = QuantisedCache.of(x).read(4, torch.float32)
    others = [0, 1, 3]
    assert torch.equal(spoilt[:, :, others], plain[:, :, others])
    assert torch.equal(spoilt[:, 1:], plain[:, 1:])


@given(data=st.data())
def test_a_token_is_rounded_alike_however_it_is_written(data):
    x = drawn(3, 2, 7, 8, seed=data.draw(st.integers(0, 99)))
    whole = QuantisedCache.of(x)
    parts = QuantisedCache.zeros((3, 2, 7, 8), CPU)
    cuts = sorted(data.draw(st.sets(st.integers(1, 6))))
    rows = data.draw(st.integers(0, 3))
    for begin, end in zip([0, *cuts], [*cuts, 7], strict=True):
        for micro_batch in (slice(0, rows), slice(rows, 3)):
            parts[micro_batch].write(x[micro_batch, :, begin:end], begin)
    assert torch.equal(parts.codes, whole.codes)
    assert torch.equal(parts.scale, whole.scale)


def test_bytes_are_what_the_ledger_counts():
    cache = QuantisedCache.zeros((2, 4, 2, 9, 16), CPU)
    assert cache.bytes == 2 * 4 * 2 * 9 * cache_bytes(16, "int8") == 2 * 4 * 2 * 9 * 18
    assert cache[1, :2].bytes == 2 * 2 * 9 * 18


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 2)])
@pytest.mark.parametrize("queries", [1, 3, 5])
def test_attention_reads_what_was_written(heads, kv_heads, queries):
    keys, head_dim = 5, 16
    q, k, v = (drawn(2, n, h, head_dim, seed=h + n) for n, h in (
        (queries, heads), (keys, kv_heads), (keys, kv_heads)))  # fmt: skip
    caches = [QuantisedCache.zeros((2, kv_heads, keys + 2, head_dim), CPU) for _ in "kv"]
    function("cache_write", Variant("int8", "bf16", "torch.quantise_copy"))(*caches, k, v, 0)
    read = [cache.read(keys, torch.float32) for cache in caches]
    plain = function("attention", Variant("bf16", "fp32", "torch.sdpa"))
    found = function("attention", FP32)(q, *caches, keys)
    assert torch.equal(found, plain(q, *read, keys))
    exact = plain(q, k.transpose(1, 2), v.transpose(1, 2), keys)
    assert 0 < (found - exact).norm() / exact.norm() < 0.02
    half = function("attention", Variant("int8", "bf16", "torch.dequant_sdpa"))
    error = half(q.bfloat16(), *caches, keys).float() - exact
    assert error.norm() / exact.norm() < 0.03


@pytest.mark.parametrize("text", [
    "attention int8/bf16/torch.dequant_sdpa", "attention int8/fp32/torch.dequant_sdpa",
    "cache_write int8/bf16/torch.quantise_copy",
])  # fmt: skip
def test_a_profile_can_run_it(text):
    op, variant = text.split()
    dims = {"batch": 2, "kv_heads": 2, "head_dim": 16}
    more = {"tokens": 3} if op == "cache_write" else {"queries": 1, "keys": 9, "heads": 4}
    item = program(op, Variant.parse(variant), **dims, **more)
    inputs = Inputs("cpu")
    inputs.cache_bytes = 1 << 20
    made = inputs.runnable(item)
    made.call()
    assert made.turns is not None
    assert made.turns > 1  # caches of other layers come between


def test_fewer_bytes_move():
    dims = {"batch": 4, "queries": 1, "keys": 1000, "heads": 8, "kv_heads": 8, "head_dim": 64}
    plain, eight = (
        program("attention", Variant.parse(v), **dims).bytes
        for v in ("bf16/bf16/torch.sdpa", "int8/bf16/torch.dequant_sdpa")
    )
    queries_and_out = 4 * 8 * 64 * 2 * 2
    assert (eight - queries_and_out) / (plain - queries_and_out) == (64 + 2) / 128
