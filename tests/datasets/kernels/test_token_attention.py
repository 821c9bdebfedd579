"""Attention of one new token in one launch, against its definition in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foreplan.datasets.kernels._token_attention import token_attention
from foreplan.datasets.kernels.quantised_cache import QuantisedCache

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
#: Batch, heads, heads of keys, features, keys: shares of keys, heads that fill no block or two.
SHAPES = [
    (2, 8, 2, 32, 9), (3, 4, 4, 64, 1), (1, 5, 1, 96, 300), (2, 12, 1, 128, 700),
    (1, 16, 2, 192, 2000), (4, 8, 4, 256, 513), (8, 32, 8, 128, 1100), (1, 1, 1, 128, 16),
]  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "plain": {}, "capped": {"cap": 3.0}, "sinks": {"sinks": None},
    "both": {"cap": 5.0, "sinks": None},
}  # fmt: skip


def definition(q: Tensor, k: Tensor, v: Tensor, *, cap: float = 0.0, sinks: Any = None) -> Tensor:
    """``q[B, 1, H, D]`` to ``k[B, G, keys, D]``, in fp64."""
    shared = q.shape[2] // k.shape[1]
    k, v = (x.double().repeat_interleave(shared, 1) for x in (k, v))
    scores = q.double().transpose(1, 2) @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(*scores.shape[:3], 1)
        return (torch.cat((scores, sink), -1).softmax(-1)[..., :-1] @ v).transpose(1, 2)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(shape, generator=draw)).to("cuda", torch.bfloat16)


@CUDA
@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_launch_computes_the_definition(shape: tuple[int, ...], own: str, bits: int) -> None:
    batch, heads, groups, features, keys = shape
    q = drawn((batch, 1, heads + 2 * groups, features), 0)[:, :, :heads]  # as in a joint projection
    more = {
        name: 2 * torch.randn(heads, device="cuda") if name == "sinks" else value
        for name, value in OWN[own].items()
    }
    # Every third sequence and a window of the positions: views of a larger cache.
    place = (slice(None, None, 3), slice(None), slice(5, 5 + keys))
    room = (3 * batch, groups, keys + 11, features)
    caches: list[Any] = [drawn(room, seed) for seed in (1, 2)]
    if bits == 8:
        caches = [QuantisedCache.of(x) for x in caches]
    caches = [x[place] for x in caches]
    found = token_attention(q, *caches, keys, **more)
    assert found is not None
    exact = [x if bits == 16 else x.read(keys, torch.float32) for x in caches]
    expected = definition(q, *exact, **more)
    assert found.shape == expected.shape
    assert float((found.double() - expected).norm() / expected.norm()) < 5e-3
    again = token_attention(q, *caches, keys, **more)
    assert again is not None
    assert torch.equal(found, again)


@CUDA
def test_what_it_does_not_take_is_left_to_torch() -> None:
    q = torch.zeros(2, 1, 4, 64, dtype=torch.bfloat16, device="cuda")
    cache = torch.zeros(2, 2, 20, 64, dtype=torch.bfloat16, device="cuda")
    assert token_attention(q, cache, cache, 20) is not None
    assert token_attention(q.float(), cache, cache, 20) is None
    assert token_attention(q.expand(2, 3, 4, 64), cache, cache, 20) is None
    assert token_attention(q, cache, cache.float(), 20) is None
    assert token_attention(q, cache, cache[:, :, ::2], 10) is None
    narrow = cache[..., :40].contiguous()
    assert token_attention(q[..., :40], narrow, narrow, 20) is None
    assert token_attention(q, cache, QuantisedCache.of(cache), 20) is None


def test_processors_have_kernels_of_their_own() -> None:
    q = torch.zeros(2, 1, 4, 64, dtype=torch.bfloat16)
    cache = torch.zeros(2, 2, 20, 64, dtype=torch.bfloat16)
    assert token_attention(q, cache, cache, 20) is None
