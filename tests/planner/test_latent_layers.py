"""Layers with attention over latents: as listed, alike in both ways, as large as planned.

That they equal transformers' own is in ``test_expert_layers.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from foreplan.datasets.kernels import registry
from foreplan.datasets.kernels.registry import kernels_for
from foreplan.datasets.kernels.runnable import Inputs
from foreplan.datasets.models.decoder_programs import layer_programs
from foreplan.datasets.models.latent import LatentAttention
from foreplan.datasets.models.latent_programs import EXPAND_HEADS
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.model import Model
from foreplan.datasets.models.weights import RandomWeights
from foreplan.datasets.operators import OPERATORS
from foreplan.datasets.program import Program, Variant, program
from foreplan.planner.verify import _decoder_layer, _latent_layer
from foreplan.planner.verify.decoder import DecoderStage
from foreplan.planner.verify.stage_kernels import PhaseKernels, StageKernels

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH, PROMPT, STEPS = 3, 8, 4
BF16 = PhaseKernels(*[Variant.parse("bf16/bf16/torch.linear")] * 2)
INT8 = PhaseKernels(
    Variant.parse("int8/bf16/torch.dequant_linear"), Variant.parse("int8/bf16/torch.int8pack_mm")
)
SDPA = Variant.parse("bf16/bf16/torch.sdpa")
ABSORBED = kernels_for("latent_attention", "cpu")


def small(name: str, **latent: int) -> Model:
    model = load_model(name)
    assert model.latent is not None
    assert model.experts is not None
    sizes = {"rank": 32, "plain": 16, "turned": 64, "value": 16} | latent
    experts = {"count": 16, "active": 2, "ffn": 64, "shared_ffn": 64, "dense_layers": (0,)}
    return model.model_copy(
        update={
            "layers": 3, "vocab": 128, "hidden": 128, "ffn": 192, "heads": 4, "kv_heads": 4,
            "latent": LatentAttention(**sizes), "experts": model.experts.model_copy(update=experts),
        }
    )  # fmt: skip


MODELS = {
    "whole queries": small("deepseek-v2-lite"),
    "ranked": small("deepseek-v3", query_rank=48),
    "wide values": small("moonlight-16b-a3b", value=80),
}


def loaded(
    model: Model, decode: Variant, linears: PhaseKernels = BF16, **options: Any
) -> DecoderStage:
    stage = DecoderStage(
        model, 0, 2, prefill_batches=(BATCH,), decode_batches=(1, BATCH - 1), prompt=PROMPT,
        positions=PROMPT + STEPS, **options,
    )  # fmt: skip
    stage.load(RandomWeights(model), StageKernels((linears,) * 2, PhaseKernels(SDPA, decode)))
    return stage


def words() -> Tensor:
    return torch.randint(128, (BATCH, PROMPT), generator=torch.Generator().manual_seed(1))


def run(stage: DecoderStage) -> list[Tensor]:
    """The residual stream behind a prefill and two steps of the last requests."""
    found = [stage.prefill(0, words()).view(BATCH, PROMPT, -1)[1:, -1]]
    for step in (1, 2):
        found.append(stage.decode(1, step, words()[1:, step]))
    return found


@pytest.mark.parametrize("decode", ABSORBED, ids=str)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_kernel_computes_the_reference(model: Model, decode: Variant) -> None:
    # Near ties of experts may be decided otherwise in bf16.
    model = model.model_copy(update={"experts": None})
    exact = run(loaded(model, decode, reference=True))
    for planned, expected in zip(run(loaded(model, decode)), exact, strict=True):
        assert expected.dtype == torch.float32
        error = (planned.float() - expected).norm() / expected.norm()
        assert error < 0.02


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_one_token_absorbed_is_the_last_of_several_expanded(model: Model) -> None:
    """Decoding a prompt's last token gives what a prefill of all of it gives."""
    whole = loaded(model, ABSORBED[0], reference=True)
    expected = whole.prefill(0, words()).view(BATCH, PROMPT, -1)[1:, -1]
    cut = loaded(model, ABSORBED[0], reference=True)
    cut.resize((BATCH,), (1, BATCH - 1), PROMPT - 1, PROMPT)
    cut.prefill(0, words()[:, :-1])
    torch.testing.assert_close(cut.decode(1, 1, words()[1:, -1]), expected, rtol=1e-4, atol=1e-4)


# What runs is what was priced --------------------------------------------------------------------


class Recorder:
    """Replaces the registry's look-ups by ones that note each call as a program."""

    def __init__(self) -> None:
        self.calls: Counter[Program] = Counter()

    def function(self, op: str, variant: Variant) -> Callable[..., Any]:
        call = registry.function(op, variant)

        def noted(*args: Any) -> Any:
            first = args[0]
            if op == "matmul":
                n = args[1].shape[2 if variant.kernel == "torch.bmm" else 1]
                sizes = [*first.shape[:2], n, first.shape[2]]
            elif op == "expand_heads":
                q, turned, _, wide = args
                plain = q.shape[-1] - turned.shape[-1]
                sizes = [q.shape[:2].numel(), q.shape[2], plain, turned.shape[-1],
                         wide.shape[-1] - plain]  # fmt: skip
            elif op == "latent_attention":
                sizes = [first.shape[1], args[3], first.shape[0], first.shape[2],
                         args[1].shape[-1]]  # fmt: skip
            elif op == "attention":
                sizes = [*first.shape[:2], args[3], first.shape[2], args[1].shape[1],
                         first.shape[-1]]  # fmt: skip
            elif op == "cache_write":
                key, value = args[2:4]
                sizes = [*key.shape[:3], (key.shape[3] + value.shape[3]) // 2]
            elif op == "rope":
                sizes = [first.shape[:-2].numel(), *first.shape[-2:]]
            else:
                sizes = [first.numel() // first.shape[-1], first.shape[-1]]
            assert len(sizes) == len(OPERATORS[op].dims)
            self.calls[Program(op, tuple(sizes), variant)] += 1
            return call(*args)

        return noted

    def linear_kernel(self, variant: Variant, kind: str) -> registry.LinearKernel:
        kernel = registry.linear_kernel(variant, kind)

        def noted(x: Tensor, packed: registry.Packed, bias: Tensor | None) -> Tensor:
            self.calls[program("linear", variant, rows=len(x), n=packed.n, k=packed.k)] += 1
            return kernel.run(x, packed, bias)

        return registry.LinearKernel(variant, kernel.layout, kernel.pack, noted, kernel.dequantise)


@pytest.mark.parametrize("decode", ABSORBED, ids=str)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_dense_layer_runs_exactly_the_listed_programs(
    model: Model, decode: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model.model_copy(update={"experts": None})
    recorder = Recorder()
    for module in (_latent_layer, _decoder_layer):
        monkeypatch.setattr(module, "function", recorder.function)
    monkeypatch.setattr(_decoder_layer, "linear_kernel", recorder.linear_kernel)
    stage = loaded(model, decode, INT8)

    def expected(batch: int, queries: int, keys: int, linear: Variant) -> Counter[Program]:
        def choose(op: str, _: object) -> Variant:
            return {"linear": linear, "attention": SDPA, "latent_attention": decode}[op]

        counts = dict(layer_programs(model, batch, queries, keys, choose))
        return Counter({made: 2 * count for made, count in counts.items()})

    stage.prefill(0, words())
    assert recorder.calls == expected(BATCH, PROMPT, PROMPT, INT8.prefill)
    recorder.calls.clear()
    stage.decode(1, 2, words()[1:, 0])
    assert recorder.calls == expected(BATCH - 1, 1, PROMPT + 2, INT8.decode)


# Measuring ---------------------------------------------------------------------------------------


def test_a_profile_calls_what_the_runtime_calls() -> None:
    inputs = Inputs("cpu")
    sizes = {"batch": 3, "m": 5, "n": 6, "k": 7}
    for variant in kernels_for("matmul", "cpu"):
        one = sizes | ({"batch": 1} if variant.kernel == "torch.linear" else {})
        made = inputs.runnable(program("matmul", variant, **one))
        assert made.call().shape == (one["batch"], 5, 6)  # type: ignore[attr-defined]
        assert "weight cold" in made.cache_state
    dims = {"heads": 4, "turned": 8}
    attends = [
        inputs.runnable(program("latent_attention", v, batch=2, keys=9, latent=16, **dims)).call()
        for v in kernels_for("latent_attention", "cpu")
    ]
    assert [out.shape for out in attends] == [(4, 2, 16)] * 3  # type: ignore[attr-defined]
    expand = program("expand_heads", EXPAND_HEADS, rows=6, plain=12, value=10, **dims)
    q, k, v = inputs.runnable(expand).call()  # type: ignore[misc]
    assert q.shape == (6, 1, 4, 20)
    assert k.shape == v.shape == (6, 4, 1, 20)
    assert not v[..., 10:].any()
    assert v[..., :10].any()
