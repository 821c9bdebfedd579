"""Maps of rows in one launch each, against torch's operators in fp64 or to the last bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from foreplan.datasets.kernels import _row_maps
from foreplan.datasets.kernels.quantised_cache import QuantisedCache
from foreplan.datasets.kernels.registry import function
from foreplan.datasets.program import Variant

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(shape, generator=draw)).to("cuda", torch.bfloat16)


def error(found: Tensor | None, expected: Tensor) -> float:
    assert found is not None
    assert found.shape == expected.shape
    return float((found.double() - expected).norm() / expected.norm())


@CUDA
@pytest.mark.parametrize("shape", [(3, 5, 8, 64), (1, 1, 1, 16), (2, 300, 6, 128), (4, 2, 3, 96)])
def test_a_rotation_turns_halves(shape: tuple[int, ...]) -> None:
    batch, tokens, heads, features = shape
    x = drawn(batch, tokens, heads + 4, features)[:, :, 2 : heads + 2]  # of a joint projection
    cos, sin = drawn(tokens, features, seed=1), drawn(tokens, features, seed=2)
    first, second = x.double().chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    expected = x.double() * cos.double()[:, None] + turned * sin.double()[:, None]
    assert error(_row_maps.rotated(x, cos, sin), expected) < 3e-3
    assert error(_row_maps.rotated(x[0], cos, sin), expected[0]) < 3e-3


@CUDA
@pytest.mark.parametrize("rows", [1, 7, 3000])
def test_activations_are_torchs(rows: int) -> None:
    gate, up = (4 * drawn(rows, 2 * 136)).chunk(2, 1)
    g, u = gate.double(), up.double()
    clamped = g.clamp(max=7)
    expected = {
        "silu_gated": F.silu(g) * u,
        "gelu_gated": F.gelu(g, approximate="tanh") * u,
        "clamped_gated": (u.clamp(-7, 7) + 1) * clamped * torch.sigmoid(1.702 * clamped),
    }
    for name, exact in expected.items():
        limits = (7.0, 1.702) if name == "clamped_gated" else ()
        assert error(_row_maps.gated(name, gate, up, *limits), exact) < 3e-3


@CUDA
def test_an_activation_of_what_is_far_out_is_no_nan() -> None:
    gate = torch.tensor([-3e38, -100.0, 0.0, 100.0, 3e4, -3e4, 1.0, -1.0], device="cuda")
    gate, up = gate.bfloat16()[None], torch.ones(1, 8, device="cuda", dtype=torch.bfloat16)
    for name in ("silu_gated", "gelu_gated"):
        found = _row_maps.gated(name, gate, up)
        assert found is not None
        assert torch.isfinite(found).all()


@CUDA
@pytest.mark.parametrize("columns", [8, 128, 264, 4096, 8192, 32768])
def test_a_norm_divides_by_the_root_of_its_mean_square(columns: int) -> None:
    x, weight = drawn(5, columns), drawn(columns, seed=1)
    exact = x.double()
    root = exact.square().mean(-1, keepdim=True).add(1e-5).sqrt()
    expected = exact / root * weight.double()
    assert error(_row_maps.rms_norm(x, weight, 1e-5), expected) < 3e-3


@CUDA
def test_a_norm_takes_heads_of_a_joint_projection() -> None:
    joint, weight = drawn(2, 3, 7, 64), drawn(64, seed=1)
    heads = joint[:, :, 2:5]
    exact = heads.double()
    expected = exact / exact.square().mean(-1, keepdim=True).add(1e-6).sqrt() * weight.double()
    assert error(_row_maps.rms_norm(heads, weight, 1e-6), expected) < 3e-3
    assert error(_row_maps.rms_norm(heads[:1], weight, 1e-6), expected[:1]) < 3e-3
    assert error(_row_maps.rms_norm(heads[0], weight, 1e-6), expected[0]) < 3e-3
    assert _row_maps.rms_norm(joint.transpose(0, 1), weight, 1e-6) is None


@CUDA
@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("shape", [(2, 5, 3, 64), (4, 1, 8, 128), (1, 70, 2, 320), (3, 2, 1, 16)])
def test_a_cache_is_written_bit_by_bit_as_on_a_processor(shape: tuple[int, ...], bits: int) -> None:
    batch, tokens, groups, features = shape
    joint = drawn(batch, tokens, 3 * groups, features)
    k, v = joint[:, :, groups : 2 * groups], joint[:, :, 2 * groups :]
    k[0, 0, 0] = 0.0  # a head of zeros keeps its zeros
    room = (batch + 1, groups, tokens + 9, features)

    def caches(device: str) -> list[Any]:
        zeros = [torch.zeros(room, dtype=torch.bfloat16, device=device) for _ in "kv"]
        made: list[Any] = zeros if bits == 16 else [QuantisedCache.of(x) for x in zeros]
        return [cache[1:] for cache in made]

    here, there = caches("cuda"), caches("cpu")
    assert _row_maps.written(here[0], here[1], k, v, 4)
    name = "bf16/bf16/torch.copy" if bits == 16 else "int8/bf16/torch.quantise_copy"
    function("cache_write", Variant.parse(name))(there[0], there[1], k.cpu(), v.cpu(), 4)
    for found, expected in zip(here, there, strict=True):
        parts = [(found, expected)]
        if bits == 8:
            parts = [(found.codes, expected.codes), (found.scale, expected.scale)]
        assert all(torch.equal(a.cpu(), b) for a, b in parts)


@CUDA
def test_a_nan_is_read_back_as_one() -> None:
    k = drawn(1, 1, 1, 64)
    k[..., 3] = math.nan
    cache = [QuantisedCache.zeros((1, 1, 2, 64), k.device) for _ in "kv"]
    assert _row_maps.written(cache[0], cache[1], k, drawn(1, 1, 1, 64), 0)
    assert cache[0].read(1, torch.float32).isnan().any()
    assert not cache[1].read(1, torch.float32).isnan().any()


@CUDA
def test_what_they_do_not_take_is_left_to_torch() -> None:
    x = drawn(4, 64)
    assert _row_maps.rms_norm(x.float(), x[0].float(), 1e-5) is None
    assert _row_maps.rms_norm(x[:, :60], x[0, :60], 1e-5) is None
    assert _row_maps.gated("silu_gated", x[:, 1:9], x[:, 8:16]) is None
    assert _row_maps.rotated(x.view(4, 1, 64)[..., :24], x[:, :24], x[:, :24]) is None
    odd = drawn(1, 1, 1, 20)
    cache = torch.zeros(1, 1, 4, 20, dtype=torch.bfloat16, device="cuda")
    assert not _row_maps.written(cache, cache, odd, odd, 0)


def test_processors_have_torchs_operators() -> None:
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    assert _row_maps.rms_norm(x, x[0], 1e-5) is None
    assert _row_maps.gated("silu_gated", x, x) is None
    assert _row_maps.rotated(x[:, None], x, x) is None
    cache = torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16)
    assert not _row_maps.written(cache, cache, x[None, :, None], x[None, :, None], 0)
