"""Devices that share a stage compute what one device computes: layers, and a run of two processes.

Shards are walked side by side in one process here, sums taken as a library would take them.
"""

import pytest
import torch
from torch import Tensor

import foreplan
from foreplan.datasets.kernels.registry import kernels_for
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.model import Model
from foreplan.datasets.models.rotary import Rotary
from foreplan.datasets.models.weights import RandomWeights, bell_shaped
from foreplan.datasets.program import Variant
from foreplan.planner.verify.decoder import DecoderStage
from foreplan.planner.verify.shard_stage import ShardStage
from foreplan.planner.verify.shard_weights import ShardWeights
from foreplan.planner.verify.stage_kernels import PhaseKernels, StageKernels

PLAIN = Variant("bf16", "bf16", "torch.linear")
ATTENTION = Variant("bf16", "bf16", "torch.sdpa")
SINKS = Variant("bf16", "bf16", "torch.sink_sdpa")
CAPPED = Variant("bf16", "bf16", "torch.capped_bmm")
PROMPT, NEW = 6, 3


def small(name: str, **changes: object) -> Model:
    """Two layers of a family, narrow."""
    base = {"layers": 2, "hidden": 64, "head_dim": 16, "ffn": 96, "vocab": 101}
    return load_model(name).model_copy(update=base | changes)


MODELS = {
    "shared heads": small("llama-3-8b", heads=8, kv_heads=2),
    "head norms": small("qwen3-0.6b", heads=4, kv_heads=4),
    "norms on both sides": small(
        "glm-4-9b", heads=4, kv_heads=2, rotary=Rotary(width=8, pairs="neighbours")
    ),
    "a window in one layer": small(
        "mistral-7b-v0.1", heads=8, kv_heads=2, sliding_window=3, window_layers=(1,)
    ),
    "parallel": small("pythia-1.4b", heads=4, kv_heads=4, rotary=Rotary(width=8)),
    "biases and learned positions": small("opt-125m", heads=4, kv_heads=4),
    "experts": small("mixtral-8x7b", heads=4, kv_heads=2).model_copy(
        update={"experts": load_model("mixtral-8x7b").experts.model_copy(
            update={"count": 4, "ffn": 32}
        )}
    ),
    "sinks and biases of experts": small(
        "gpt-oss-20b", heads=8, kv_heads=2, sliding_window=3, window_layers=(1,)
    ).model_copy(
        update={"experts": load_model("gpt-oss-20b").experts.model_copy(
            update={"count": 4, "active": 2, "ffn": 32}
        )}
    ),
    "capped scores": small(
        "gemma-2-2b", heads=8, kv_heads=2, score_cap=1.5, logit_cap=0.5, sliding_window=3,
        window_layers=(1,),
    ),
}  # fmt: skip


class Unequal(RandomWeights):
    """With scores of sinks, and biases, that differ: random weights have them all alike."""

    def slices(self, part, name, rows):
        """As of `RandomWeights`."""
        at = 0
        for piece in super().slices(part, name, rows):
            alike = piece.dim() == 1 and "norm" not in name
            key = f"unequal {part}/{name}"
            yield (
                piece + 20 * bell_shaped(key, piece.shape, piece.dtype, first=at)
                if alike
                else piece
            )
            at += len(piece)


def kernels(variant: Variant, layers: int, attention: Variant = ATTENTION) -> StageKernels:
    both = PhaseKernels(variant, variant)
    return StageKernels(
        (both,) * layers, PhaseKernels(attention, attention), PhaseKernels(PLAIN, PLAIN)
    )


def together(shards: list[ShardStage], phase: int, step: int, x: Tensor) -> list[Tensor]:
    """One pass of every shard, piece by piece."""
    walks = [shard.passing(phase, 0, step, x) for shard in shards]
    for _ in range(shards[0].exchanges):
        parts = [next(walk) for walk in walks]
        total = torch.stack([part.double() for part in parts]).sum(0)
        for part in parts:
            part.copy_(total)
    made = [next(walk) for walk in walks]
    assert all(next(walk, None) is None for walk in walks)
    return made


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_shards_compute_the_logits_and_tokens_of_one_device(name, degree):
    model = MODELS[name]
    options = {
        "prefill_batches": (2,), "decode_batches": (2,), "prompt": PROMPT,
        "positions": PROMPT + NEW, "reference": True,
    }  # fmt: skip
    one = DecoderStage(model, 0, model.layers, **options)
    shards = [
        ShardStage(model, 0, model.layers, degree=degree, lane=lane, **options)
        for lane in range(degree)
    ]
    for stage in (one, *shards):
        attention = SINKS if model.sinks else CAPPED if model.score_cap else ATTENTION
        stage.load(Unequal(model, seed=3), kernels(PLAIN, model.layers, attention))
        stage.keep_logits = True
    ids = torch.randint(model.vocab, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for step in range(NEW):
            mine = together(shards, min(step, 1), step, ids)
            ids = one.prefill(0, ids) if step == 0 else one.decode(0, step, ids)
            logits = torch.cat([shard.logits for shard in shards], 1)
            assert torch.allclose(logits, one.logits, rtol=1e-4, atol=1e-5)
            assert all(torch.equal(tokens, ids) for tokens in mine)
    whole, parts = one.memory_bytes(), [shard.memory_bytes() for shard in shards]
    assert sum(part["embedding"] for part in parts) >= whole["embedding"]
    cached = sum(part["kv_cache"] for part in parts)
    assert cached == whole["kv_cache"] * max(1, degree // model.kv_heads)


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_quantised_shards_come_close(bits):
    """Scales of a split input are a device's own, so that equality is not to be had."""
    model = small("llama-3-8b", heads=8, kv_heads=2, hidden=256, head_dim=32, ffn=512)
    variant = next(v for v in kernels_for("linear", "cpu") if v.storage == bits)
    options = {
        "prefill_batches": (2,), "decode_batches": (2,), "prompt": PROMPT,
        "positions": PROMPT + NEW, "reference": True,
    }  # fmt: skip
    plain, one = (DecoderStage(model, 0, model.layers, **options) for _ in range(2))
    shards = [
        ShardStage(model, 0, model.layers, degree=2, lane=lane, **options) for lane in range(2)
    ]
    plain.load(RandomWeights(model, seed=3), kernels(PLAIN, model.layers))
    for stage in (one, *shards):
        stage.load(RandomWeights(model, seed=3), kernels(variant, model.layers))
    for stage in (plain, one, *shards):
        stage.keep_logits = True
    ids = torch.randint(model.vocab, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    plain.prefill(0, ids)
    one.prefill(0, ids)
    with torch.no_grad():
        together(shards, 0, 0, ids)
    logits = torch.cat([shard.logits for shard in shards], 1)
    lost = (one.logits - plain.logits).norm()
    assert lost > 0
    assert (logits - plain.logits).norm() <= 1.1 * lost


def test_slices_of_a_shard_join_to_its_part():
    model = MODELS["shared heads"]
    source = RandomWeights(model, seed=3)
    for lane in range(4):
        shard = ShardWeights(source, 4, lane)
        for part in (0, "embedding", "head"):
            for name in shard.names(part):
                whole = shard.tensor(part, name)
                assert tuple(whole.shape) == shard.shape(part, name)
                slices = list(shard.slices(part, name, 7))
                assert [len(s) for s in slices[:-1]] == [7] * (len(slices) - 1)
                assert torch.equal(torch.cat(slices), whole)


def test_two_processes_share_a_stage(two_processors):
    """A plan with a stage of two processors, run for real and against one process."""
    workload = {
        "batch": 4, "prompt_tokens": 16, "new_tokens": 4, "bits": [16, 8], "tensor_parallel": 2,
        "prefill_microbatch": 2, "decode_microbatch": 4,
    }  # fmt: skip
    made = foreplan.plan("serving", "tiny-llama-random", two_processors, workload, costs="measured")
    assert [stage["peers"] for stage in made.decision["stages"]] == [[1]]
    assert made.verify.ranks == 2
    run = foreplan.verify(made, rounds=1, only=[])
    document = run.document
    assert [each.mode for each in document.agreement] == ["reference", "forced"]
    assert all(each.exact for each in document.agreement)
    for rank in document.candidates[0].ranks:
        held = {item.item: item for item in rank.memory}
        for name in ("weights", "kv_cache", "embedding", "head"):
            assert held[name].held_bytes == held[name].predicted_bytes
    sums = run.timeline.total_s("all_reduce")
    assert len(sums) == 2
    assert (sums > 0).all()
