"""Attention with sinks and with capped scores against its definition, in every variant."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foreplan.datasets.kernels import _scored_attention
from foreplan.datasets.kernels.quantised_cache import QuantisedCache
from foreplan.datasets.kernels.registry import DEVICE_KINDS, function, kernels_for
from foreplan.datasets.kernels.runnable import Inputs
from foreplan.datasets.operators import ATTENTIONS
from foreplan.datasets.program import Variant, program

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
KINDS = [pytest.param(kind, marks=[CUDA] if kind == "cuda" else []) for kind in DEVICE_KINDS]
SCORED = sorted(ATTENTIONS - {"attention"})
#: Batch, queries, keys, heads, heads of keys, features, window.
SHAPES = [
    (2, 9, 9, 8, 2, 24, None), (2, 1, 9, 8, 2, 24, None), (1, 5, 11, 4, 4, 16, None),
    (2, 5, 11, 8, 2, 20, 6), (1, 1, 1, 4, 2, 24, None), (1, 200, 200, 4, 2, 16, None),
    (2, 70, 333, 6, 3, 64, 100),
]  # fmt: skip
#: Norm of the error: codes of 8 bits, and bf16.
ERROR = {"int8": 0.02, "bf16": 0.01, "fp32": 1e-5}
Shape = tuple[int, int, int, int, int, int, int | None]


class Case:
    """Inputs and what is expected of them."""

    def __init__(self, op: str, shape: Shape, kind: str) -> None:
        batch, queries, self.keys, heads, kv_heads, features, self.window = shape
        draw = torch.Generator().manual_seed(self.keys)
        room = (batch, kv_heads, self.keys + 5, features)
        self.q, self.k, self.v = (
            (2 * torch.randn(size, generator=draw)).to(kind)
            for size in ((batch, queries, heads, features), room, room)
        )
        sinks = (2 * torch.randn(heads, generator=draw)).to(kind)
        self.own = {"sinks": sinks} if op == "sink_attention" else {"cap": 3.0}

    def expected(self) -> Tensor:
        """By the definition, in fp64."""
        q, k, v = (x.double() for x in (self.q.transpose(1, 2), self.k, self.v))
        k, v = (x[:, :, : self.keys].repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
        if "cap" in self.own:
            scores = 3.0 * torch.tanh(scores / 3.0)
        place = torch.arange(self.keys, device=q.device)
        query = place[-q.shape[2] :, None]
        hidden = place > query
        if self.window is not None:
            hidden |= place <= query - self.window
        scores = scores.masked_fill(hidden, -torch.inf)
        if "sinks" in self.own:
            sinks = self.own["sinks"].double()[:, None, None].expand(*scores.shape[:3], 1)
            share = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        else:
            share = scores.softmax(-1)
        return (share @ v).transpose(1, 2)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", SCORED)
def test_every_variant_computes_its_definition(op: str, shape: Shape, kind: str) -> None:
    case = Case(op, shape, kind)
    for variant in kernels_for(op, kind):
        caches = [case.k, case.v]
        if variant.storage == "int8":
            caches = [QuantisedCache.of(x) for x in caches]  # type: ignore[misc]
        found = function(op, variant)(case.q, *caches, case.keys, case.window, **case.own)
        assert found.shape == case.q.shape
        assert found.dtype == case.q.dtype
        worst = ERROR[variant.compute if variant.storage == "bf16" else "int8"]
        assert error(found, case.expected()) < worst, variant


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 512])
@pytest.mark.parametrize("op", SCORED)
def test_products_compute_the_same_whatever_the_block(
    op: str, rows: int, shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU without a fused kernel for a call runs, sinks under a mask among them."""
    monkeypatch.setattr(_scored_attention, "SCORED_ROWS", {"cpu": rows})
    monkeypatch.setattr(_scored_attention, "_fused", lambda *_, **__: False)
    case = Case(op, shape, "cpu")
    run = function(op, next(v for v in kernels_for(op, "cpu") if v.compute == "fp32"))
    found = run(case.q, case.k, case.v, case.keys, case.window, **case.own)
    assert error(found, case.expected()) < 1e-5


def test_a_sink_takes_its_share_and_far_below_none() -> None:
    case = Case("sink_attention", SHAPES[0], "cpu")
    fp32 = Variant.parse("bf16/fp32/torch.sink_sdpa")
    plain = function("attention", Variant.parse("bf16/fp32/torch.sdpa"))
    without = plain(case.q, case.k, case.v, case.keys)
    for sink, same in ((-100.0, True), (0.0, False)):
        sinks = torch.full((case.q.shape[2],), sink)
        found = function("sink_attention", fp32)(case.q, case.k, case.v, case.keys, sinks=sinks)
        assert torch.allclose(found, without, atol=1e-6) == same
        assert (found.abs() <= without.abs() + 1e-6).all()


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_clamped_before_they_are_activated(kind: str) -> None:
    """gpt-oss (transformers, ``GptOssExperts._apply_gate``), beyond both limits and within."""
    gate, up = (torch.linspace(low, 20, 300).to(kind) for low in (-20, -15))
    found = function("activation", Variant.parse("bf16/bf16/torch.clamped_silu_mul"))(gate, up)
    gate, up = gate.double().clamp(max=7), up.double().clamp(-7, 7)
    assert error(found, (up + 1) * gate * torch.sigmoid(1.702 * gate)) < 1e-6


def test_weights_of_a_biased_router_are_a_softmax_over_the_chosen() -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(30, 16, generator=draw), torch.randn(6, 16, generator=draw)
    bias = torch.tensor([9.0, -9.0, 0, 0, 0, 0])
    route = function("router", Variant.parse("bf16/bf16/torch.topk"))
    chosen, share = route(x, weight, 2, True, None, 1, 1, bias)
    scores, best = (x @ weight.T + bias).topk(2)
    assert torch.equal(chosen, best)
    assert torch.allclose(share, scores.softmax(-1), atol=1e-6)
    assert (chosen == 0).any(1).float().mean() > 0.9


@pytest.mark.parametrize("op", SCORED)
def test_a_profile_calls_what_the_runtime_calls(op: str) -> None:
    sizes = {"batch": 2, "keys": 9, "heads": 4, "kv_heads": 2, "head_dim": 16}
    for variant in kernels_for(op, "cpu"):
        for queries in (1, 5, 9):
            made = Inputs("cpu").runnable(program(op, variant, queries=queries, **sizes))
            assert made.call().shape == (2, queries, 4, 16)  # type: ignore[attr-defined]
            assert "behind a cold product" in made.cache_state
