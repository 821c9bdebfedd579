"""Decoder stages: what they compute equals transformers, in one stage or in several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from foreplan.datasets.kernels import registry
from foreplan.datasets.kernels.registry import kernels_for, layout_of
from foreplan.datasets.models import attention_window
from foreplan.datasets.models.attention_window import layer_kinds
from foreplan.datasets.models.decoder_memory import stage_bytes
from foreplan.datasets.models.decoder_programs import (
    embedding_programs,
    head_programs,
    layer_programs,
)
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.model import Model
from foreplan.datasets.models.weights import RandomWeights, WeightSource, open_weights
from foreplan.datasets.operators import ATTENTIONS, OPERATORS
from foreplan.datasets.program import Program, Variant
from foreplan.planner.verify import _decoder_layer, decoder
from foreplan.planner.verify.decoder import DecoderStage
from foreplan.planner.verify.stage_kernels import PhaseKernels, StageKernels

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH, PROMPT, STEPS = 4, 9, 6
POSITIONS = PROMPT + STEPS

LLAMA = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 160,
    "max_position_embeddings": 64,
}
OPT = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "ffn_dim": 128,
    "vocab_size": 160,
    "max_position_embeddings": 64,
}
GPT2 = {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 160, "n_positions": 64}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.3, 1.1, 2.0],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
GEMMA3 = LLAMA | {
    "head_dim": 24,
    "sliding_window": 6,
    "query_pre_attn_scalar": 10,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "pad_token_id": 0,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-mha-bias": LLAMA
    | {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True, "head_dim": 24},
    "llama-llama3": LLAMA | {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    "llama-linear": LLAMA
    | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}},
    "qwen2": LLAMA,
    "qwen2-yarn": LLAMA | {"rope_parameters": YARN},
    "llama-yarn": LLAMA
    | {
        "head_dim": 32,
        "rope_parameters": YARN
        | {"beta_fast": 4.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 0.9},
    },
    "glm-yarn": LLAMA
    | {"pad_token_id": 0, "rope_parameters": YARN | {"mscale": 1.2, "mscale_all_dim": 0.7}},
    "qwen3": LLAMA | {"head_dim": 32, "tie_word_embeddings": True},
    "mistral": LLAMA | {"sliding_window": 5},
    "phi3": LLAMA | {"sliding_window": 11, "pad_token_id": 0},
    "phi3-partial": LLAMA | {"partial_rotary_factor": 0.75, "head_dim": 32, "pad_token_id": 0},
    "phi3-longrope": LLAMA
    | {
        "rope_parameters": LONGROPE,
        "pad_token_id": 0,
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 32,
    },
    "starcoder2": LLAMA | {"sliding_window": 4},
    "qwen2-window": LLAMA
    | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "smollm3-window": LLAMA | {"use_sliding_window": True, "sliding_window": 3, "pad_token_id": 0},
    "seed_oss": LLAMA | {"head_dim": 24, "attention_out_bias": True},
    "smollm3": LLAMA | {"no_rope_layers": [1, 0, 1, 1], "pad_token_id": 0},
    "ernie4_5": LLAMA | {"head_dim": 24, "use_bias": True},
    "glm": LLAMA | {"head_dim": 24, "pad_token_id": 0},
    "granite": LLAMA
    | {
        "attention_multiplier": 0.1,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 4.0,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "gemma": LLAMA | {"head_dim": 24, "pad_token_id": 0},
    "gpt_neox": LLAMA | {"rotary_pct": 0.5},
    "gpt_neox-behind": LLAMA | {"use_parallel_residual": False, "attention_bias": False},
    "olmo2": LLAMA,
    "gemma3_text": GEMMA3,
    "gemma3_text-linear": GEMMA3
    | {
        "layer_types": None,
        "sliding_window_pattern": 2,
        "sliding_window": 32,
        "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    },
    # Caps within what scores and logits are, so that they bend both.
    "gemma2": LLAMA
    | {
        "head_dim": 24,
        "sliding_window": 6,
        "query_pre_attn_scalar": 10,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 60.0,
        "pad_token_id": 0,
    },
    "glm4": LLAMA | {"head_dim": 24, "pad_token_id": 0},
    "opt": OPT,
    "opt-untied": OPT | {"enable_bias": False, "tie_word_embeddings": False},
    "gpt2": GPT2,
}

#: Cases of which every layer is another list of programs, or loaded another way.
LISTED = (
    "llama", "qwen3", "gpt2", "opt-untied", "phi3-partial", "starcoder2", "smollm3", "glm", "gemma",
    "olmo2", "glm4", "gemma2", "gemma3_text", "gpt_neox", "mistral",
)  # fmt: skip

FP32 = PhaseKernels(*[Variant.parse("fp32/fp32/torch.linear")] * 2)
BF16 = PhaseKernels(*[Variant.parse("bf16/bf16/torch.linear")] * 2)
SDPA = PhaseKernels(*[Variant.parse("bf16/bf16/torch.sdpa")] * 2)
SDPA8 = PhaseKernels(*[Variant.parse("int8/bf16/torch.dequant_sdpa")] * 2)
PHASE_PAIRS = {
    "int8": PhaseKernels(
        Variant.parse("int8/bf16/torch.dequant_linear"),
        Variant.parse("int8/bf16/torch.int8pack_mm"),
    ),
    "int4": PhaseKernels(
        Variant.parse("int4/bf16/torch.unpack_linear"),
        Variant.parse("int4/bf16/torch.int4pack_mm"),
    ),
    "int3": PhaseKernels(*[Variant.parse("int3/bf16/torch.dequant_linear")] * 2),
    "bf16": PhaseKernels(
        Variant.parse("bf16/fp32/torch.upcast_linear"), Variant.parse("bf16/bf16/torch.linear")
    ),
}


def build(case: str, folder: Path) -> tuple[Any, Model]:
    """A random model with nothing left at zero or one, and what we read of its folder."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(case.split("-")[0], **CASES[case])
    module = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            spread = 0.5 if "embed_tokens" in name or "wte" in name else 0.1
            parameter.normal_(1.0 if "norm" in name or "ln_" in name else 0.0, spread)
    module.save_pretrained(folder)
    return module, load_model(folder)


def prompts(vocab: int) -> Tensor:
    return torch.randint(3, vocab, (BATCH, PROMPT), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def greedy_transformers(module: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits ``[steps, batch, vocab]`` and tokens ``[steps, batch]`` without a cache."""
    logits, tokens = [], []
    for _ in range(STEPS):
        last = module(input_ids=ids).logits[:, -1]
        logits.append(last)
        tokens.append(last.argmax(-1))
        ids = torch.cat([ids, tokens[-1][:, None]], dim=1)
    return torch.stack(logits), torch.stack(tokens)


def chain(
    model: Model,
    weights: WeightSource,
    kernels: Callable[[int], PhaseKernels],
    cuts: Sequence[int],
    *,
    prefill: Sequence[int] = (BATCH,),
    decode: Sequence[int] = (BATCH,),
    reference: bool = False,
    head: PhaseKernels = BF16,
    attention: PhaseKernels = SDPA,
) -> list[DecoderStage]:
    attention = of_family(model, attention)
    stages = []
    for start, end in zip([0, *cuts], [*cuts, model.layers], strict=True):
        stage = DecoderStage(
            model,
            start,
            end,
            prefill_batches=prefill,
            decode_batches=decode,
            prompt=PROMPT,
            positions=POSITIONS,
            reference=reference,
        )
        layers = tuple(kernels(layer) for layer in range(start, end))
        stage.load(weights, StageKernels(layers, attention, head))
        stage.keep_logits = True
        stages.append(stage)
    return stages


def of_family(model: Model, attention: PhaseKernels) -> PhaseKernels:
    """The kernels of a model's kind of attention that are what these are of a plain one."""
    if model.score_cap is None:
        return attention
    return PhaseKernels(
        *(replace(v, kernel=v.kernel.replace("sdpa", "capped_bmm")) for v in attention.both)
    )


def greedy_stages(stages: list[DecoderStage], ids: Tensor) -> tuple[Tensor, Tensor]:
    prefill, decode = stages[0]._batches

    def through(phase: str, sizes: Sequence[int], rows: Tensor, *step: int) -> tuple[Tensor, ...]:
        logits, tokens = [], []
        for micro_batch, x in enumerate(rows.split(list(sizes))):
            for stage in stages:
                x = getattr(stage, phase)(micro_batch, *step, x)
            assert x.is_contiguous()
            tokens.append(x)
            assert stages[-1].logits is not None
            logits.append(stages[-1].logits)
        return torch.cat(logits), torch.cat(tokens)

    passes = [through("prefill", prefill, ids)]
    for step in range(1, STEPS):
        passes.append(through("decode", decode, passes[-1][1], step))
    return torch.stack([p[0] for p in passes]), torch.stack([p[1] for p in passes])


@pytest.mark.parametrize("case", CASES)
def test_reference_equals_transformers(case: str, tmp_path: Path) -> None:
    module, model = build(case, tmp_path)
    ids = prompts(model.vocab)
    expected, tokens = greedy_transformers(module, ids)
    stages = chain(model, open_weights(model), lambda _: FP32, [2], reference=True, head=FP32)
    logits, ours = greedy_stages(stages, ids)
    assert torch.equal(ours, tokens)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))
    # Not a model that says the same whatever it read.
    assert (expected - expected.mean(1, keepdim=True)).std() > 0.15 * expected.std()


@pytest.mark.parametrize("block", [1, 2, 3])
@pytest.mark.parametrize("case", ["gemma3_text", "gemma2"])
@pytest.mark.parametrize("attention", [SDPA, SDPA8], ids=["plain", "quantised"])
def test_blocks_of_a_window_compute_the_same(
    case: str, block: int, attention: PhaseKernels, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    _, model = build(case, tmp_path)
    ids, weights = prompts(model.vocab), open_weights(model)
    logits = []
    for each in (attention_window.BLOCK, block):
        monkeypatch.setattr(attention_window, "BLOCK", each)
        stages = chain(
            model, weights, lambda _: FP32, [2], reference=True, head=FP32, attention=attention
        )
        logits.append(greedy_stages(stages, ids)[0])
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4 * float(logits[0].std()))


@pytest.mark.parametrize("case", ["llama", "gpt2", "qwen3", "opt", "gemma2"])
def test_planned_bf16_is_close_to_transformers(case: str, tmp_path: Path) -> None:
    module, model = build(case, tmp_path)
    ids = prompts(model.vocab)
    expected, _ = greedy_transformers(module, ids)
    stages = chain(model, open_weights(model), lambda _: BF16, [1, 3])
    logits, _ = greedy_stages(stages, ids)
    error = (logits[0].float() - expected[0]).norm() / expected[0].norm()
    assert error < 0.05


@pytest.mark.parametrize("attention", [SDPA, SDPA8], ids=["plain", "quantised"])
@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("case", ["llama", "opt"])
def test_stages_equal_one_stage_bit_for_bit(
    case: str, reference: bool, attention: PhaseKernels, tmp_path: Path
) -> None:
    _, model = build(case, tmp_path)
    ids = prompts(model.vocab)
    mixed = [BF16, *(PHASE_PAIRS[name] for name in ("int8", "int4", "int3"))]
    runs = [
        greedy_stages(
            chain(
                model,
                open_weights(model),
                mixed.__getitem__,
                cuts,
                reference=reference,
                prefill=(1, 3),
                decode=(2, 2),
                attention=attention,
            ),
            ids,
        )
        for cuts in ([], [1], [1, 2, 3])
    ]
    for logits, tokens in runs[1:]:
        assert torch.equal(logits, runs[0][0])
        assert torch.equal(tokens, runs[0][1])


def test_micro_batches_only_divide_the_rows(tmp_path: Path) -> None:
    _, model = build("llama", tmp_path)
    ids = prompts(model.vocab)
    weights = open_weights(model)
    results = [
        greedy_stages(
            chain(model, weights, lambda _: FP32, [2], reference=True, head=FP32, **sizes), ids
        )
        for sizes in ({}, {"prefill": (1, 1, 1, 1)}, {"prefill": (3, 1), "decode": (1, 2, 1)})
    ]
    for logits, tokens in results[1:]:
        assert torch.equal(tokens, results[0][1])
        torch.testing.assert_close(logits, results[0][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("storage", PHASE_PAIRS)
def test_planned_stage_is_close_to_its_reference(storage: str) -> None:
    model = load_model("tiny-llama-random").model_copy(update={"layers": 3})
    weights, ids = RandomWeights(model, seed=3), prompts(model.vocab)
    kernels = PHASE_PAIRS[storage]
    outcomes = []
    for reference in (False, True):
        stages = chain(model, weights, lambda _: kernels, [], reference=reference, head=kernels)
        logits = [stages[0].prefill(0, ids), stages[0].logits]
        stages[0].decode(0, 1, ids[:, 0])
        outcomes.append((logits[1], stages[0].logits))
    for planned, exact in zip(*outcomes, strict=True):
        assert planned is not None
        assert exact is not None
        error = (planned.float() - exact).norm() / exact.norm()
        assert error < 0.03


def test_quantised_reference_uses_the_dequantised_weights() -> None:
    model = load_model("tiny-llama-random").model_copy(update={"layers": 2})
    weights, ids = RandomWeights(model, seed=3), prompts(model.vocab)
    logits = {}
    for name, kernels in {"fp32": FP32, "int8": PHASE_PAIRS["int8"]}.items():
        stages = chain(model, weights, lambda _, k=kernels: k, [], reference=True, head=FP32)
        logits[name] = greedy_stages(stages, ids)[0][0]
    error = (logits["int8"] - logits["fp32"]).norm() / logits["fp32"].norm()
    assert 1e-4 < error < 0.05


# What runs is what was priced --------------------------------------------------------------------


class Recorder:
    """Replaces the registry's look-ups by ones that note each call as a program."""

    def __init__(self) -> None:
        self.calls: Counter[Program] = Counter()

    def note(self, op: str, variant: Variant, *sizes: int) -> None:
        assert len(sizes) == len(OPERATORS[op].dims)
        self.calls[Program(op, tuple(sizes), variant)] += 1

    def function(self, op: str, variant: Variant) -> Callable[..., Any]:
        run = registry.function(op, variant)

        def noted(*args: Any, **own: Any) -> Any:
            first = args[0]
            if op == "norm":
                sizes = [first.numel() // first.shape[-1], first.shape[-1]]
            elif op == "rope":
                sizes = [first.shape[:-2].numel(), *first.shape[-2:]]
            elif op == "cache_write":
                sizes = list(args[2].shape)
            elif op in ATTENTIONS:
                batch, tokens, heads, head_dim = first.shape
                cache = getattr(args[1], "codes", args[1])
                sizes = [batch, tokens, args[3], heads, cache.shape[1], head_dim]
            elif op == "embedding":
                sizes = [args[1].numel(), first.shape[1]]
            else:
                sizes = [first.numel() // first.shape[-1], first.shape[-1]]
            self.note(op, variant, *sizes)
            return run(*args, **own)

        return noted

    def linear_kernel(self, variant: Variant, kind: str) -> registry.LinearKernel:
        kernel = registry.linear_kernel(variant, kind)

        def noted(x: Tensor, packed: registry.Packed, bias: Tensor | None) -> Tensor:
            self.note("linear", variant, x.shape[0], packed.n, packed.k)
            return kernel.run(x, packed, bias)

        return registry.LinearKernel(variant, kernel.layout, kernel.pack, noted, kernel.dequantise)


@pytest.mark.parametrize("attention", [SDPA, SDPA8], ids=["plain", "quantised"])
@pytest.mark.parametrize("case", LISTED)
def test_stage_runs_exactly_the_listed_programs(
    case: str, attention: PhaseKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = build(case, tmp_path)
    recorder = Recorder()
    for module in (decoder, _decoder_layer):
        monkeypatch.setattr(module, "function", recorder.function)
    monkeypatch.setattr(_decoder_layer, "linear_kernel", recorder.linear_kernel)
    kernels = PHASE_PAIRS["int8"]
    (stage,) = chain(
        model, open_weights(model), lambda _: kernels, [], head=kernels, attention=attention
    )

    def expected(queries: int, keys: int, linear: Variant) -> Counter[Program]:
        def choose(op: str, dims: object) -> Variant:
            return linear if op == "linear" else of_family(model, attention).prefill

        counts: Counter[Program] = Counter()
        for kind in layer_kinds(model, POSITIONS):
            for made, count in layer_programs(model, BATCH, queries, keys, choose, *kind):
                counts[made] += count
        counts.update(dict(embedding_programs(model, BATCH, queries)))
        counts.update(dict(head_programs(model, BATCH, choose)))
        return counts

    tokens = stage.prefill(0, prompts(model.vocab))
    assert recorder.calls == expected(PROMPT, PROMPT, kernels.prefill)
    recorder.calls.clear()
    stage.decode(0, 2, tokens)
    assert recorder.calls == expected(1, PROMPT + 2, kernels.decode)


@pytest.mark.parametrize("attention", [SDPA, SDPA8], ids=["plain", "quantised"])
@pytest.mark.parametrize("storage", ["bf16", "int8", "int4"])
@pytest.mark.parametrize(
    "name",
    [
        "tiny-llama-random", "opt-125m", "qwen3-0.6b", "smollm3-3b", "gemma-2-2b", "gemma-3-1b",
        "olmo-2-7b",
    ],
)  # fmt: skip
def test_bytes_held_are_the_bytes_planned(name: str, storage: str, attention: PhaseKernels) -> None:
    small = {"layers": 5, "vocab": 128, "max_positions": 64}
    if name in ("smollm3-3b", "gemma-2-2b", "gemma-3-1b", "olmo-2-7b"):  # whose layers are wide
        small |= {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 256}
    model = load_model(name).model_copy(update=small)
    kernels = PHASE_PAIRS[storage]
    stages = chain(model, RandomWeights(model), lambda _: kernels, [1, 3], attention=attention)
    for stage in stages:
        planned = stage_bytes(
            model,
            stage.start,
            stage.end,
            [storage] * (stage.end - stage.start),
            batch=BATCH,
            positions=POSITIONS,
            cache_storage=attention.decode.storage,
        )
        assert stage.memory_bytes() == planned


def test_every_cpu_linear_kernel_runs_in_a_layer() -> None:
    model = load_model("tiny-llama-random").model_copy(update={"layers": 1})
    weights, ids = RandomWeights(model), prompts(model.vocab)
    variants = kernels_for("linear", "cpu", n=model.hidden, k=model.ffn)
    assert len({layout_of(variant) for variant in variants}) == 6
    (exact,) = chain(model, weights, lambda _: FP32, [], reference=True, head=FP32)
    exact.prefill(0, ids)
    for variant in variants:
        (stage,) = chain(model, weights, lambda _, v=variant: PhaseKernels(v, v), [])
        stage.prefill(0, ids)
        stage.decode(0, 1, ids[:, 0])
        exact.decode(0, 1, ids[:, 0])
        assert stage.logits is not None
        assert exact.logits is not None
        error = (stage.logits.float() - exact.logits).norm() / exact.logits.norm()
        assert error < {"int3": 0.4, "int4": 0.2}.get(variant.storage, 0.03), variant
