"""Every kernel against fp32 arithmetic on the weight it really holds."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest
import torch

from foreplan.datasets.dtypes import weight_bytes
from foreplan.datasets.kernels import registry as kernels
from foreplan.datasets.operators import OPERATORS
from foreplan.datasets.program import Variant
from foreplan.errors import SpecError

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
KINDS = ["cpu", pytest.param("cuda", marks=CUDA)]

#: Largest relative error (in norm) of a format against the fp32 weight, normal weights.
#: int8: a row's largest of some hundreds is about 3.2 sigma, so a step is 3.2/127 sigma and its
#: uniform error step/sqrt(12) = 0.7 %; int4/int3: a group of 64 spans about 4.7 sigma in 15 or 7
#: steps, 9 % and 19 %; fp8 e4m3: 3 bits of mantissa, 2.6 %.
FORMAT_ERROR = {
    "fp32": 0.0,
    "bf16": 0.003,
    "fp8": 0.04,
    "int8": 0.012,
    "int4": 0.11,
    "int3": 0.24,
}
#: Largest relative error (in norm) of the arithmetic against fp32 on the dequantised weight.
#: int8: 0.9 % with activations in 8 bits, twice that in 7 (processors without VNNI).
COMPUTE_ERROR = {"fp32": 0.004, "tf32": 0.004, "bf16": 0.006, "int8": 0.03, "fp8": 0.05}


def _relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def _weight(n: int, k: int, device: str = "cpu") -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n * 7 + k)).to(device)


def _linear_cases() -> list[object]:
    return [
        pytest.param(kind, variant, id=f"{kind}-{variant}", marks=[CUDA] if kind == "cuda" else [])
        for kind in kernels.DEVICE_KINDS
        for variant in kernels.kernels_for("linear", kind)
    ]


@pytest.mark.parametrize(("kind", "variant"), _linear_cases())
def test_linear_matches_fp32_on_its_own_weight(kind: str, variant: Variant) -> None:
    kernel = kernels.linear_kernel(variant, kind)
    shapes = [(64, 64), (144, 128), (256, 192), (272, 320)]
    odd = [(7, 33), (1, 1), (100, 65), (33, 130), (5, 80)]
    shapes += [s for s in odd if variant in kernels.kernels_for("linear", kind, n=s[0], k=s[1])]
    for n, k in shapes:
        weight = _weight(n, k, kind)
        packed = kernel.pack(weight)
        held = kernel.dequantise(packed)
        assert held.shape == (n, k)
        assert held.dtype == torch.float32
        if k >= 64 and n > 1:
            assert _relative(held, weight) <= FORMAT_ERROR[variant.storage]
        for rows in (1, 2, 3, 17, 64, 100):
            x = _weight(rows, k, kind).to(torch.bfloat16)
            for bias in (None, _weight(n, 1, kind)[:, 0].to(torch.bfloat16)):
                out = kernel.run(x, packed, bias)
                assert out.dtype == torch.bfloat16
                assert out.shape == (rows, n)
                expected = kernels.reference_linear(x.float(), held, bias)
                scale = x.float().norm() * held.norm() / (rows * n) ** 0.5
                error = (out.float() - expected).norm() / max(
                    float(expected.norm()), float(scale) * 0.5
                )
                assert float(error) <= COMPUTE_ERROR[variant.compute], (n, k, rows)


@pytest.mark.parametrize("variant", kernels.kernels_for("linear", "cpu"), ids=str)
def test_packed_bytes_are_what_the_memory_model_counts(variant: Variant) -> None:
    packed = kernels.linear_kernel(variant, "cpu").pack(_weight(256, 640))
    assert packed.bytes == pytest.approx(weight_bytes(256, 640, variant.storage), rel=0.002)


def test_kernels_of_one_layout_share_one_weight() -> None:
    by_layout: dict[str, list[kernels.LinearKernel]] = {}
    for variant in kernels.kernels_for("linear", "cpu"):
        kernel = kernels.linear_kernel(variant, "cpu")
        assert kernel.layout == kernels.layout_of(variant)
        by_layout.setdefault(kernel.layout, []).append(kernel)
    weight, x = _weight(128, 256), _weight(5, 256).to(torch.bfloat16)
    for group in by_layout.values():
        packed = group[0].pack(weight)
        outputs = [kernel.run(x, packed, None) for kernel in group]
        for out in outputs[1:]:
            assert _relative(out, outputs[0]) < 0.035


def test_every_listed_kernel_exists_and_no_other() -> None:
    for kind in kernels.DEVICE_KINDS:
        module = importlib.import_module(f"foreplan.datasets.kernels._kernels_{kind}")
        assert set(module.RUN) == set(kernels.kernels_for("linear", kind))
    functions = importlib.import_module("foreplan.datasets.kernels._kernel_functions").FUNCTIONS
    ops = {op for op, _ in functions}
    assert ops < set(OPERATORS)
    listed = {(op, v) for op in ops for v in kernels.kernels_for(op, "cpu")}
    assert set(functions) == listed


def test_shapes_a_kernel_cannot_take_are_left_out() -> None:
    names = {str(v) for v in kernels.kernels_for("linear", "cpu", n=50257, k=768)}
    assert "int4/bf16/torch.int4pack_mm" not in names
    assert "int4/bf16/torch.dequant_linear" in names


def test_unknown_names_are_spec_errors() -> None:
    with pytest.raises(SpecError, match="tpu"):
        kernels.kernels_for("linear", "tpu")
    with pytest.raises(SpecError, match="conv"):
        kernels.kernels_for("conv", "cpu")
    with pytest.raises(SpecError, match="nothing"):
        kernels.linear_kernel(Variant("bf16", "bf16", "nothing"), "cpu")
    with pytest.raises(SpecError, match="cuda"):
        kernels.linear_kernel(Variant("fp8", "fp8", "torch.scaled_mm"), "cpu")
    with pytest.raises(SpecError, match=r"torch\.add"):
        kernels.function("norm", Variant("bf16", "bf16", "torch.add"))


def test_names_are_known_without_torch() -> None:
    code = (
        "import sys; from foreplan.datasets.kernels.registry import kernels_for, layout_of;"
        "[layout_of(v) for v in kernels_for('linear', 'cpu')]; assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_the_int4_layout_of_this_machine_is_known() -> None:
    layouts = importlib.import_module("foreplan.datasets.kernels._kernel_layouts")
    assert layouts.int4_block() in (16, 32, 64)


@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE"])
def test_int8_products_are_exact_where_the_processor_saturates(isa: str) -> None:
    code = """
import torch
from foreplan.datasets.kernels import _kernels_cpu as cpu
limit = cpu.int8_limit()
for rows, n, k in ((1, 64, 64), (5, 33, 70), (64, 256, 256), (1, 512, 512)):
    q = torch.full((rows, k), limit, dtype=torch.int8)
    w = torch.randint(-127, 128, (n, k)).sign().mul(127).to(torch.int8)
    got = cpu.multiply_int8(q, w, direct=limit == 127)
    assert got.double().equal(q.double() @ w.double().t()), (limit, rows, n, k)
"""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_int4_through_the_kernel_when_the_packing_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layouts = importlib.import_module("foreplan.datasets.kernels._kernel_layouts")
    layout = layouts.LAYOUTS["int4.pack"]
    packed = layout.pack(_weight(80, 128))
    known = layout.dequantise(packed)
    monkeypatch.setattr(layouts, "int4_block", lambda: None)
    assert _relative(layout.dequantise(packed), known) < 0.005


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("batch", "queries", "keys", "heads", "kv_heads"),
    [(2, 1, 5, 4, 2), (1, 1, 1, 4, 4), (3, 1, 33, 6, 6), (2, 7, 7, 4, 2), (1, 3, 9, 4, 4)],
)
def test_attention_is_causal_at_the_end_of_the_cache(
    kind: str, compute: str, batch: int, queries: int, keys: int, heads: int, kv_heads: int
) -> None:
    run = kernels.function("attention", Variant("bf16", compute, "torch.sdpa"))
    dim = 16
    random = torch.Generator().manual_seed(keys)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(torch.bfloat16).to(kind)

    q = draw(batch, queries, heads, dim)
    cache_k, cache_v = draw(batch, kv_heads, keys + 4, dim), draw(batch, kv_heads, keys + 4, dim)
    got = run(q, cache_k, cache_v, keys)
    assert got.shape == q.shape
    assert got.dtype == torch.bfloat16
    share = heads // kv_heads
    k = cache_k[:, :, :keys].double().repeat_interleave(share, 1)
    v = cache_v[:, :, :keys].double().repeat_interleave(share, 1)
    scores = q.double().transpose(1, 2) @ k.transpose(2, 3) / dim**0.5
    hidden = torch.ones(queries, keys, device=kind).triu(keys - queries + 1).bool()
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    assert _relative(got, expected.transpose(1, 2)) < 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_functions_match_their_definitions(kind: str) -> None:
    def run(op: str, text: str, *args: object) -> torch.Tensor:
        out: torch.Tensor = kernels.function(op, Variant.parse(text))(*args)
        return out

    x = _weight(5, 24, kind).to(torch.bfloat16)
    y = _weight(5, 24, kind).to(torch.bfloat16) * 0.5
    weight, bias = _weight(24, 1, kind)[:, 0].to(torch.bfloat16), x[0]
    wide = x.double()
    rms = wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double()
    got = run("norm", "bf16/bf16/torch.rms_norm", x, weight, None, 1e-5)
    assert _relative(got, rms) < 0.01
    layer = (wide - wide.mean(1, keepdim=True)) / (
        wide.var(1, keepdim=True, unbiased=False) + 1e-5
    ).sqrt() * weight.double() + bias.double()
    got = run("norm", "bf16/bf16/torch.layer_norm", x, weight, bias, 1e-5)
    assert _relative(got, layer) < 0.01
    silu = wide / (1 + (-wide).exp()) * y.double()
    assert _relative(run("activation", "bf16/bf16/torch.silu_mul", x, y), silu) < 0.01
    gated = torch.nn.functional.gelu(wide, approximate="tanh") * y.double()
    assert _relative(run("activation", "bf16/bf16/torch.gelu_tanh_mul", x, y), gated) < 0.01
    gelu = wide * 0.5 * (1 + torch.erf(wide / 2**0.5))
    assert _relative(run("activation", "bf16/bf16/torch.gelu", x), gelu) < 0.01
    assert _relative(run("activation", "bf16/bf16/torch.gelu_tanh", x), gelu) < 0.01
    assert torch.equal(run("activation", "bf16/bf16/torch.relu", x), x.clamp(min=0))
    assert torch.equal(run("add", "bf16/bf16/torch.add", x, y), x + y)
    assert torch.equal(run("argmax", "bf16/bf16/torch.argmax", x), x.float().argmax(1))
    ids = torch.tensor([4, 0, 0], device=kind)
    assert torch.equal(run("embedding", "bf16/bf16/torch.embedding", x, ids), x[ids])
    assert run("cast", "bf16/fp32/torch.to", x).dtype == torch.float32
    assert run("cast", "fp32/bf16/torch.to", x.float()).dtype == torch.bfloat16


def test_rope_turns_pairs_and_keeps_their_length() -> None:
    rows, heads, dim = 3, 2, 8
    x = _weight(rows, heads * dim).view(rows, heads, dim)
    angle = torch.arange(rows)[:, None] * 10000 ** (-torch.arange(dim // 2) / (dim // 2))
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    got = kernels.function("rope", Variant("bf16", "bf16", "torch.rope"))(x, cos, sin)
    pairs = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)[:, None])
    assert torch.allclose(got, torch.cat((turned[..., 0], turned[..., 1]), -1), atol=1e-6)


def test_cache_write_fills_only_its_positions() -> None:
    write = kernels.function("cache_write", Variant("bf16", "bf16", "torch.copy"))
    k, v = torch.ones(2, 3, 2, 4), torch.full((2, 3, 2, 4), 2.0)
    cache_k, cache_v = torch.zeros(2, 2, 9, 4), torch.zeros(2, 2, 9, 4)
    write(cache_k, cache_v, k, v, 5)
    assert cache_k[:, :, 5:8].eq(1).all()
    assert cache_v[:, :, 5:8].eq(2).all()
    assert cache_k.sum() == k.numel()
    assert cache_v.sum() == 2 * v.numel()


def test_fragments_hold_the_same_values_as_the_plain_layouts() -> None:
    from foreplan.datasets.kernels._fragment_linear import from_fragments, to_fragments
    from foreplan.datasets.kernels._kernel_layouts import LAYOUTS

    for bits in (4, 8):
        values = torch.randint(0, 2**bits, (48, 192), generator=torch.Generator().manual_seed(1))
        assert torch.equal(from_fragments(to_fragments(values, bits)), values.to(torch.uint8))
    weight = _weight(48, 192)
    for fragments, plain in (("int4.fragments", "int4.nibbles"), ("int8.fragments", "int8.rows")):
        packed = LAYOUTS[fragments].pack(weight)
        held = LAYOUTS[plain].dequantise(LAYOUTS[plain].pack(weight))
        assert torch.equal(LAYOUTS[fragments].dequantise(packed), held)
        assert packed.bytes == pytest.approx(weight_bytes(48, 192, fragments[:4]), rel=0.002)


def test_a_lane_s_word_holds_what_the_tensor_core_takes() -> None:
    """Nibbles of one word of one lane, by the operand layout of mma.m16n8k16."""
    from foreplan.datasets.kernels._fragment_linear import to_fragments

    values = torch.zeros(16, 64, dtype=torch.int64)
    lane, word = 4 * 5 + 2, 3  # r = 5, t = 2
    at = 16 * 2 + 4 * word
    values[5, at], values[5, at + 1], values[13, at + 2], values[13, at + 3] = 1, 2, 3, 4
    words = to_fragments(values, 4)
    assert words.shape == (1, 1, 1, 32, 4)
    expected = 1 | 2 << 16 | 3 << 12 | 4 << 28
    assert int(words[0, 0, 0, lane, word]) & 0xFFFFFFFF == expected
    assert int(words.ne(0).sum()) == 1
    # Bytes: step 3 is the last two words of eight.
    words = to_fragments(values, 8)
    assert words.shape == (1, 1, 2, 32, 4)
    assert words[0, 0, 1, lane].tolist() == [0, 0, 1 | 2 << 16, 3 << 8 | 4 << 24]
    assert int(words.ne(0).sum()) == 2


def test_rows_that_a_fused_kernel_computes() -> None:
    fused = Variant.parse("int4/bf16/foreplan.fragment_linear")
    assert [kernels.computed_rows(fused, r) for r in (1, 8, 9, 17, 32, 33, 49, 64, 96, 97)] == [
        8, 8, 16, 32, 32, 40, 64, 64, 96, 97
    ]  # fmt: skip
    assert [kernels.computed_rows(fused, r, "9.0") for r in (9, 32, 33, 64, 65, 384, 385)] == [
        16, 32, 64, 64, 128, 384, 385
    ]  # fmt: skip
    assert kernels.computed_rows(fused, 97, "8.0") == 97
    assert kernels.computed_rows(Variant.parse("bf16/bf16/torch.linear"), 9, "9.0") == 9
    packed = Variant.parse("int8/bf16/torch.int8pack_mm")
    assert [kernels.computed_rows(packed, r) for r in (1, 4, 5, 8, 9)] == [4, 7, 11, 14, 18]
