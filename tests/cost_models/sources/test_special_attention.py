"""Prices of attention that is not plain, which are those of its parts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.cost_models.roofline import RooflineSource
from foreplan.cost_models.sources.predicted import PredictedSource
from foreplan.cost_models.sources.special_attention import (
    _computed_pairs,
    special_attention_parts,
)
from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.kernels.registry import kernels_for
from foreplan.datasets.operator_bytes import visible_pairs
from foreplan.datasets.program import Variant, program

PREDICTED = PredictedSource()
CPU = Device(name="cpu:threads=1", vendor="test", chip="c", kind="cpu")
H200 = device_zoo.device("h200")
LATENT = {"batch": 8, "keys": 1000, "heads": 128, "latent": 512, "turned": 64}
HEADS = {"batch": 2, "heads": 16, "kv_heads": 4, "head_dim": 64}


@pytest.mark.parametrize("variant", kernels_for("sink_attention", "cpu"), ids=str)
def test_attention_with_sinks_is_plain_and_scaled(variant: Variant) -> None:
    whole = program("sink_attention", variant, queries=128, keys=128, **HEADS)
    parts = special_attention_parts(whole, CPU)
    assert parts is not None
    (plain, one), (scaled, other) = parts
    assert (plain.op, plain.sizes, one, other) == ("attention", whole.sizes, 1.0, 1.0)
    assert plain.variant in kernels_for("attention", "cpu")
    assert plain.variant.storage == variant.storage
    assert scaled.dims["rows"] * scaled.dims["cols"] == 2 * 128 * 16 * 64


@pytest.mark.parametrize(
    ("batch", "queries", "keys", "measured_s"),
    [(4, 128, 256, 52.5e-6), (8, 256, 256, 78.2e-6)],
)
def test_a_gpu_computes_every_score_of_a_block(
    batch: int, queries: int, keys: int, measured_s: float
) -> None:
    """Heads of Gemma 2 on an H200, docs/results/h200.md."""
    dims = {"batch": batch, "queries": queries, "keys": keys, "heads": 8, "kv_heads": 4}
    kernel = Variant.parse("bf16/bf16/torch.capped_bmm")
    whole = program("capped_attention", kernel, head_dim=128, **dims)
    parts = special_attention_parts(whole, H200)
    assert parts is not None
    pairs = batch * 8 * queries * keys
    assert sum(p.flops * n for p, n in parts if p.op == "matmul") == 4 * 128 * pairs
    source = PredictedSource(
        devices={"d": device_zoo.device("h200")}, switch_s={"d": 0.65e-6}
    )  # fmt: skip
    found = source.estimate(whole, "d")
    assert found is not None
    assert found.mean_s == pytest.approx(measured_s, rel=0.25)


@pytest.mark.parametrize(("batch", "measured_s"), [(1, 54.8e-6), (4, 87.8e-6), (8, 127e-6)])
def test_products_compute_sinks_under_a_mask(batch: int, measured_s: float) -> None:
    """Heads of a small gpt-oss on an H200, 128 queries of a window of 128 keys."""
    dims = {"batch": batch, "queries": 128, "keys": 256, "heads": 16, "kv_heads": 4}
    kernel = Variant.parse("bf16/bf16/torch.sink_sdpa")
    whole = program("sink_attention", kernel, head_dim=64, **dims)
    source = PredictedSource(devices={"d": H200}, switch_s={"d": 0.65e-6})
    found = source.estimate(whole, "d")
    assert found is not None
    assert found.mean_s == pytest.approx(measured_s, rel=0.35)


@pytest.mark.parametrize("op", ["sink_attention", "capped_attention"])
@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_a_token_s_attention_is_a_plain_one_on_a_gpu(op: str, storage: str) -> None:
    variant = next(
        v for v in kernels_for(op, "cuda") if (v.storage, v.compute) == (storage, "bf16")
    )
    parts = special_attention_parts(program(op, variant, queries=1, keys=999, **HEADS), H200)
    assert parts is not None
    ((plain, count),) = parts
    assert (plain.op, count) == ("attention", 1.0)
    assert plain.variant in kernels_for("attention", "cuda")
    old = device_zoo.device("v100_sxm2_32gb")
    torchs = special_attention_parts(program(op, variant, queries=1, keys=999, **HEADS), old)
    assert torchs is not None
    assert len(torchs) > 1


@given(queries=st.integers(1, 2000), more=st.integers(0, 2000), block=st.integers(1, 600))
def test_blocks_compute_more_pairs_than_are_seen(queries: int, more: int, block: int) -> None:
    keys = queries + more
    computed = _computed_pairs(queries, keys, block)
    assert visible_pairs({"queries": queries, "keys": keys}) <= computed <= queries * keys
    assert computed == queries * keys or block < queries


@pytest.mark.parametrize(("queries", "keys"), [(1, 1000), (128, 128), (64, 192)])
def test_parts_of_capped_attention_do_its_work(queries: int, keys: int) -> None:
    for variant in kernels_for("capped_attention", "cpu"):
        whole = program("capped_attention", variant, queries=queries, keys=keys, **HEADS)
        parts = special_attention_parts(whole, CPU)
        assert parts is not None
        products = sum(p.flops * n for p, n in parts if p.op == "matmul")
        assert products == pytest.approx(whole.flops, rel=0.01)
        casts = variant.storage != variant.compute
        assert len(parts) == (5 if casts else 4)
        if variant.compute == "bf16":
            found = PREDICTED.estimate(whole, "h200")
            assert found is not None
            plain = program("attention", Variant.parse("bf16/bf16/torch.sdpa"), **whole.dims)
            fused = PREDICTED.estimate(plain, "h200")
            assert fused is not None
            if queries > 1:  # a token's is one launch, which caps its scores beside all else
                assert found.mean_s > fused.mean_s


def test_parts_of_an_attention_over_latents_do_its_work() -> None:
    whole = program("latent_attention", Variant.parse("bf16/bf16/torch.latent_bmm"), **LATENT)
    parts = special_attention_parts(whole, CPU)
    assert parts is not None
    assert sum(p.flops * n for p, n in parts if p.op == "matmul") == pytest.approx(whole.flops)
    # A kernel that does it all at once is not made of them, and nobody predicts it.
    fused = program("latent_attention", Variant.parse("bf16/bf16/torch.latent_sdpa"), **LATENT)
    assert special_attention_parts(fused, CPU) is None
    assert PREDICTED.estimate(fused, "h200") is None


def test_heads_of_latents_move_as_many_bytes_as_their_parts() -> None:
    whole = program(
        "expand_heads", Variant.parse("bf16/bf16/torch.expand_heads"),
        rows=2048, heads=128, plain=128, turned=64, value=128,
    )  # fmt: skip
    parts = special_attention_parts(whole, CPU)
    assert parts is not None
    assert sum(p.bytes * n for p, n in parts) == pytest.approx(whole.bytes, rel=0.2)


@pytest.mark.parametrize("device", ["h200", "l4"])
def test_longer_contexts_of_latents_never_cost_less(device: str) -> None:
    kernel = Variant.parse("bf16/bf16/torch.latent_bmm")
    for source in (PREDICTED, RooflineSource(device_zoo.device(device))):
        works = [program("latent_attention", kernel, **LATENT | {"keys": 1 << n})
                 for n in range(8, 17)]  # fmt: skip
        found = [source.estimate(work, device) for work in works]
        times = [each.mean_s for each in found if each is not None]
        assert len(times) == len(works)
        assert all(b > 0.999 * a for a, b in itertools.pairwise(times))
        # 16 times the latents at the device's bandwidth or rate, in the end.
        assert times[-1] > 8 * times[-5]
