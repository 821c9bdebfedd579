"""Layers of experts, run for real: equal to transformers, as listed, as large as planned."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from foreplan.datasets.experts import EXPERT_OPERATORS
from foreplan.datasets.kernels import registry
from foreplan.datasets.kernels.expert_kernels import expert_mlps
from foreplan.datasets.kernels.registry import kernels_for, linear_kernel
from foreplan.datasets.kernels.runnable import Inputs
from foreplan.datasets.models.attention_window import layer_kinds
from foreplan.datasets.models.decoder_memory import stage_bytes
from foreplan.datasets.models.decoder_programs import layer_programs
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.model import Model
from foreplan.datasets.models.weights import RandomWeights, WeightSource, open_weights
from foreplan.datasets.operators import ATTENTIONS
from foreplan.datasets.program import Program, Variant, program
from foreplan.planner.verify import _decoder_layer, _expert_layer
from foreplan.planner.verify.decoder import DecoderStage
from foreplan.planner.verify.stage_kernels import PhaseKernels, StageKernels

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH, PROMPT, STEPS, VOCAB = 3, 8, 4, 96
SMALL = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": VOCAB, "max_position_embeddings": 64,
    "eos_token_id": 1,
}  # fmt: skip
FEW = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
#: Of routers with a correction: eight experts in groups, behind a dense layer.
ROUTED = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7,
}  # fmt: skip
#: Of attention over latents, YaRN's magnitude in its scores.
LATENT = SMALL | ROUTED | {
    "kv_lora_rank": 16, "q_lora_rank": 32, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "num_key_value_heads": 4,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "mscale": 0.9, "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 16,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "mixtral": SMALL | {"num_local_experts": 5},
    "qwen2_moe": SMALL | FEW | {"shared_expert_intermediate_size": 64, "decoder_sparse_step": 2},
    "qwen3_moe": SMALL | FEW | {"head_dim": 32, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "olmoe": SMALL | FEW,
    "glm4_moe": SMALL | ROUTED | {"attention_bias": True, "use_qk_norm": True, "head_dim": 32},
    "deepseek_v2": LATENT | {"q_lora_rank": None, "rope_parameters": YARN},
    "deepseek_v2-groups": LATENT
    | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "deepseek_v3": LATENT | {"n_group": 4, "topk_group": 2, "rope_parameters": YARN},
    "deepseek_v3-halves": LATENT
    | {
        "n_group": 1,
        "topk_group": 1,
        "rope_interleave": False,
        "q_lora_rank": None,
        "attention_bias": True,
        "rms_norm_eps": 1e-3,
        "v_head_dim": 20,
    },
    "gpt_oss": SMALL
    | {
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "intermediate_size": 64,
        "head_dim": 24,
        "sliding_window": 5,
        "rope_parameters": YARN | {"mscale": None, "truncate": False},
    },
    "gpt_oss-whole": SMALL
    | {
        "num_local_experts": 4,
        "intermediate_size": 64,
        "num_experts_per_tok": 4,
        "attention_bias": False,
        "layer_types": ["full_attention"] * 3,
    },
    "glm4_moe-groups": SMALL | ROUTED | {"n_group": 4, "topk_group": 2, "norm_topk_prob": False},
}
FP32, BF16 = (
    PhaseKernels(*[Variant.parse(f"{text}/torch.linear")] * 2)
    for text in ("fp32/fp32", "bf16/bf16")
)
INT8 = PhaseKernels(
    Variant.parse("int8/bf16/torch.dequant_linear"), Variant.parse("int8/bf16/torch.int8pack_mm")
)
INT4 = PhaseKernels(*[Variant.parse("int4/bf16/torch.dequant_linear")] * 2)
SDPA = PhaseKernels(*[Variant.parse("bf16/bf16/torch.sdpa")] * 2)
SINKS = PhaseKernels(*[Variant.parse("bf16/bf16/torch.sink_sdpa")] * 2)
LATENTS = PhaseKernels(SDPA.prefill, Variant.parse("bf16/bf16/torch.latent_bmm"))


def build(case: str, folder: Path) -> tuple[Any, Model]:
    """A random model with clear preferences among its experts, and what we read of its folder."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(case.split("-")[0], **CASES[case])
    module = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 1.0 if "sinks" in name else 0.15)
        for name, buffer in module.named_buffers():
            if "correction" in name:
                buffer.normal_(0.0, 0.3)
    module.save_pretrained(folder, max_shard_size="200KB")
    return module, load_model(folder)


def stages(
    model: Model, weights: WeightSource, layers: Sequence[PhaseKernels], cuts: Sequence[int] = (),
    *, reference: bool = False,
) -> list[DecoderStage]:  # fmt: skip
    made, attention = [], SDPA if model.latent is None else LATENTS
    if model.sinks:
        attention = SINKS
    for start, end in zip([0, *cuts], [*cuts, model.layers], strict=True):
        stage = DecoderStage(
            model, start, end, prefill_batches=(BATCH,), decode_batches=(1, BATCH - 1),
            prompt=PROMPT, positions=PROMPT + STEPS, reference=reference,
        )  # fmt: skip
        head = FP32 if reference else BF16
        stage.load(weights, StageKernels(tuple(layers[start:end]), attention, head))
        stage.keep_logits = True
        made.append(stage)
    return made


def forced_logits(chain: list[DecoderStage], ids: Tensor) -> Tensor:
    """Logits ``[batch, STEPS, vocab]`` of the last positions of given ``[batch, tokens]``."""

    def through(phase: str, micro_batch: int, x: Tensor, *step: int) -> Tensor:
        for stage in chain:
            x = getattr(stage, phase)(micro_batch, *step, x)
        assert chain[-1].logits is not None
        return chain[-1].logits

    found = [through("prefill", 0, ids[:, :PROMPT])]
    for step in range(1, STEPS):
        rows = ids[:, PROMPT + step - 1].split([1, BATCH - 1])
        found.append(torch.cat([through("decode", m, x, step) for m, x in enumerate(rows)]))
    return torch.stack(found, 1)


def words() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCAB, (BATCH, PROMPT + STEPS), generator=generator)


@pytest.mark.parametrize("case", CASES)
def test_reference_equals_transformers(case: str, tmp_path: Path) -> None:
    module, model = build(case, tmp_path)
    ids = words()
    with torch.no_grad():
        expected = module(input_ids=ids).logits[:, PROMPT - 1 : PROMPT - 1 + STEPS]
    chain = stages(model, open_weights(model), [FP32] * 3, [1], reference=True)
    ours = forced_logits(chain, ids)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))
    # Not a model that says the same whatever it read.
    assert (expected - expected.mean(0)).std() > 0.15 * expected.std()


class Open(torch.nn.Module):
    """A gate that lets everything through: its sigmoid is 1."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.full((*x.shape[:-1], 1), 100.0)


def test_deepseek_is_qwen2_without_the_gate(tmp_path: Path) -> None:
    """Transformers has no class for the first DeepSeekMoE; what differs are names and the gate."""
    case = SMALL | FEW | {"shared_expert_intermediate_size": 128, "mlp_only_layers": [0]}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen2_moe", qkv_bias=False, **case)
    module = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    module.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for name in [name for name in stored if "shared_expert" in name]:
        tensor = stored.pop(name)
        if "shared_expert_gate" not in name:
            stored[name.replace("shared_expert", "shared_experts")] = tensor
    save_file(stored, tmp_path / "model.safetensors")
    theirs = json.loads((tmp_path / "config.json").read_text())
    ours = {name: value for name, value in theirs.items() if name in SMALL or "rope" in name}
    ours |= {
        "model_type": "deepseek", "architectures": ["DeepseekForCausalLM"],
        "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
        "n_shared_experts": 2, "first_k_dense_replace": 1, "norm_topk_prob": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(ours))
    for layer in module.model.layers[1:]:
        layer.mlp.shared_expert_gate = Open()
    model, ids = load_model(tmp_path), words()
    assert model.layer_classes == ("dense", "moe", "moe")
    with torch.no_grad():
        expected = module(input_ids=ids).logits[:, PROMPT - 1 : PROMPT - 1 + STEPS]
    logits = forced_logits(stages(model, open_weights(model), [FP32] * 3, reference=True), ids)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))


@pytest.mark.parametrize("variants", [BF16, INT8, INT4])
def test_planned_kernels_are_close_to_the_reference(variants: PhaseKernels, tmp_path: Path) -> None:
    _, model = build("qwen2_moe", tmp_path)
    chains = [
        stages(model, open_weights(model), [variants] * 3, reference=reference)
        for reference in (True, False)
    ]
    exact, ours = (forced_logits(chain, words()).float() for chain in chains)
    # A near tie of two experts may be decided otherwise: the median row, not the worst.
    error = (ours - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(error.median()) < 0.05


def test_stages_equal_one_stage_bit_for_bit(tmp_path: Path) -> None:
    _, model = build("qwen3_moe", tmp_path)
    layers = [INT8, BF16, INT4]
    one, two, three = (
        forced_logits(stages(model, open_weights(model), layers, cuts), words())
        for cuts in ([], [1], [1, 2])
    )
    assert torch.equal(one, two)
    assert torch.equal(one, three)


@pytest.mark.parametrize("storage", ["fp32", "int8", "int4", "int3"])
def test_experts_are_the_weighted_sum_of_their_mlps(storage: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, count, active, ffn, hidden = 37, 5, 2, 64, 128
    kernel = linear_kernel(
        next(v for v in kernels_for("experts", "cpu", n=64, k=64) if v.storage == storage), "cpu"
    )

    def packed(n: int, k: int) -> list[registry.Packed]:
        drawn = torch.randn(count, n, k, generator=generator) * k**-0.5
        return [kernel.pack(weight) for weight in drawn]

    ups, downs = packed(2 * ffn, hidden), packed(hidden, ffn)
    dtype = torch.float32 if storage == "fp32" else torch.bfloat16
    x = torch.randn(rows, hidden, generator=generator).to(dtype)
    share, chosen = torch.rand(rows, count, generator=generator).topk(active)
    out = expert_mlps()(x, chosen, share, ups, downs, kernel.run, lambda g, u: F.silu(g) * u)
    expected = torch.zeros(rows, hidden)
    for row, place in ((r, a) for r in range(rows) for a in range(active)):
        expert = int(chosen[row, place])
        gate, up = (kernel.dequantise(ups[expert]) @ x[row].float()).chunk(2)
        made = kernel.dequantise(downs[expert]) @ (F.silu(gate) * up)
        expected[row] += share[row, place] * made
    assert out.dtype == dtype
    error = (out.float() - expected).norm() / expected.norm()
    assert error < (1e-5 if storage == "fp32" else 0.01)


# What runs is what was priced --------------------------------------------------------------------


class Recorder:
    """Replaces the registry's look-ups by ones that note each call of an MLP as a program."""

    def __init__(self) -> None:
        self.calls: Counter[Program] = Counter()
        self.within = False
        self.variants: dict[Any, Variant] = {}

    def function(self, op: str, variant: Variant) -> Callable[..., Any]:
        run = registry.function(op, variant)

        def noted(*args: Any, **own: Any) -> Any:
            rows, cols = args[0].shape[0], args[0].shape[-1]
            if op in ATTENTIONS:
                sizes = (*args[0].shape[:2], args[3], args[0].shape[2], args[1].shape[1], cols)
                found = Program(op, tuple(sizes), variant)
            elif op == "router":
                found = program(op, variant, rows=rows, experts=len(args[1]), active=args[2],
                                hidden=cols)  # fmt: skip
            else:
                found = program(op, variant, rows=rows, cols=cols)
            if not self.within:
                self.calls[found] += 1
            return run(*args, **own)

        return noted if op in (*ATTENTIONS, "router", "shared_gate", "activation") else run

    @staticmethod
    def op_of(args: Sequence[Any]) -> str:
        """The operator that a call of experts is, by its biases."""
        return "experts" if args[-1] == (None, None) else "biased_experts"

    def expert_mlps(self) -> Callable[..., Any]:
        run = expert_mlps()

        def noted(*args: Any) -> Any:
            x, chosen, _, ups, _, linear, _, _ = args
            self.calls[program(
                self.op_of(args), self.variants[linear], rows=len(x), experts=len(ups),
                active=chosen.shape[1], ffn=ups[0].n // 2, hidden=x.shape[1],
            )] += 1  # fmt: skip
            self.within = True
            try:
                return run(*args)
            finally:
                self.within = False

        return noted

    def linear_kernel(self, variant: Variant, kind: str) -> registry.LinearKernel:
        kernel = registry.linear_kernel(variant, kind)

        def noted(x: Tensor, packed: registry.Packed, bias: Tensor | None) -> Tensor:
            if not self.within:
                made = program("linear", variant, rows=len(x), n=packed.n, k=packed.k)
                self.calls[made] += 1
            return kernel.run(x, packed, bias)

        self.variants[noted] = variant
        return registry.LinearKernel(variant, kernel.layout, kernel.pack, noted, kernel.dequantise)


@pytest.mark.parametrize("case", CASES)
def test_a_stage_runs_the_listed_programs(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = build(case, tmp_path)
    recorder = Recorder()
    for module in (_expert_layer, _decoder_layer):
        monkeypatch.setattr(module, "function", recorder.function)
        monkeypatch.setattr(module, "linear_kernel", recorder.linear_kernel)
    monkeypatch.setattr(_expert_layer, "expert_mlps", recorder.expert_mlps)
    (stage, _) = stages(model, open_weights(model), [INT8] * 3, [2])
    noted = {"linear", "router", "shared_gate", "activation", *EXPERT_OPERATORS, *ATTENTIONS}
    attention = SINKS if model.sinks else SDPA

    def expected(batch: int, queries: int, keys: int, linear: Variant) -> Counter[Program]:
        counts: Counter[Program] = Counter()
        for kind in layer_kinds(model, PROMPT + STEPS)[:2]:
            for made, count in layer_programs(
                model, batch, queries, keys,
                lambda op, _: linear if op == "linear" else attention.decode, *kind,
            ):  # fmt: skip
                counts[made] += count if made.op in noted else 0
        return +counts

    stage.prefill(0, words()[:, :PROMPT])
    assert recorder.calls == expected(BATCH, PROMPT, PROMPT, INT8.prefill)
    recorder.calls.clear()
    stage.decode(1, 1, words()[1:, 0])
    assert recorder.calls == expected(BATCH - 1, 1, PROMPT + 1, INT8.decode)


@pytest.mark.parametrize("variants", [BF16, INT8, INT4])
@pytest.mark.parametrize(
    "name", ["qwen1.5-moe-a2.7b", "deepseek-moe-16b", "olmoe-1b-7b", "glm-4.5-air", "gpt-oss-20b"]
)
def test_bytes_held_are_the_bytes_planned(name: str, variants: PhaseKernels) -> None:
    whole = load_model(name)
    assert whole.experts is not None
    experts = whole.experts.model_copy(update={"count": 3, "active": 2, "ffn": 64})
    small = {"layers": 3, "vocab": 128, "hidden": 128, "ffn": 192, "experts": experts}
    model = whole.model_copy(update=small)
    for stage in stages(model, RandomWeights(model), [variants] * 3, [1]):
        storages = [variants.decode.storage] * (stage.end - stage.start)
        assert stage.memory_bytes() == stage_bytes(
            model, stage.start, stage.end, storages, batch=BATCH, positions=PROMPT + STEPS
        )


# Measuring ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 40])
def test_a_profile_calls_what_the_runtime_calls(rows: int) -> None:
    inputs = Inputs("cpu")
    dims = {"rows": rows, "experts": 6, "active": 2, "hidden": 64}
    cases = itertools.product(EXPERT_OPERATORS, kernels_for("experts", "cpu", n=64, k=64)[:3])
    for op, variant in cases:
        made = inputs.runnable(program(op, variant, ffn=64, **dims))
        assert isinstance(made.call(), Tensor)
        assert "uniform draws" in made.cache_state
    for variant in kernels_for("router", "cpu"):
        chosen, share = inputs.runnable(program("router", variant, **dims | {"experts": 8})).call()  # type: ignore[misc]
        assert chosen.shape == share.shape == (rows, 2)
        assert torch.allclose(share.sum(-1), torch.ones(rows))
    gate = program("shared_gate", kernels_for("shared_gate", "cpu")[0], rows=rows, cols=64)
    assert inputs.runnable(gate).call().shape == (rows, 64)  # type: ignore[attr-defined]
