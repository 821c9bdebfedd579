"""Weight sources: what a folder holds under our names; random weights that every rank shares."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.weights import FolderWeights, RandomWeights, bell_shaped, open_weights
from foreplan.errors import SpecError

SMALL = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 40,
    "vocab_size": 51,
}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("max_shard_size", ["1GB", "10KB"])
def test_llama_folder_is_fused(max_shard_size: str, tmp_path: Path) -> None:
    module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    module.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    model = load_model(tmp_path)
    weights = open_weights(model)
    assert isinstance(weights, FolderWeights)
    block = module.model.layers[1]
    attention = block.self_attn
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    qkv = torch.cat([projection.weight for projection in projections])
    with weights:
        assert weights.names(1) == (
            "norm1.weight",
            "qkv.weight",
            "out.weight",
            "norm2.weight",
            "up.weight",
            "down.weight",
        )
        assert torch.equal(weights.tensor(1, "qkv.weight"), qkv)
        gate_up = torch.cat([block.mlp.gate_proj.weight, block.mlp.up_proj.weight])
        assert torch.equal(weights.tensor(1, "up.weight"), gate_up)
        assert torch.equal(weights.tensor("head", "head.weight"), module.lm_head.weight)
        assert torch.equal(weights.tensor("head", "final_norm.weight"), module.model.norm.weight)


def test_gpt2_is_transposed_and_tied(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=24, n_layer=2, n_head=4, vocab_size=51, n_positions=16)
    module = transformers.GPT2LMHeadModel(config)
    module.save_pretrained(tmp_path)
    weights = FolderWeights(load_model(tmp_path))
    up = weights.tensor(0, "up.weight")
    assert torch.equal(up, module.transformer.h[0].mlp.c_fc.weight.t())
    assert up.is_contiguous()
    embedding = weights.tensor("embedding", "embed.weight")
    assert torch.equal(weights.tensor("head", "head.weight"), embedding)
    assert weights.tensor("embedding", "positions.weight").shape == (16, 24)
    # Another checkpoint in the same place is noticed, not misread.
    transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=12, n_layer=2, n_head=4, vocab_size=51)
    ).save_pretrained(tmp_path)
    with pytest.raises(SpecError, match="shape"):
        FolderWeights(weights.model).tensor(0, "up.weight")


def test_weights_that_another_folder_holds_are_missed_with_the_folder_they_were_sought_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=12, n_layer=2, n_head=4, vocab_size=51)
    ).save_pretrained(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    model = load_model("mine")
    FolderWeights(model).close()
    monkeypatch.chdir("/")
    with pytest.raises(SpecError, match=r"got 'mine', .*starts from the current folder, /$"):
        FolderWeights(model)


def test_factors_are_in_the_weights_and_not_in_what_is_stored(tmp_path: Path) -> None:
    factors = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0}
    module = transformers.GraniteForCausalLM(
        transformers.GraniteConfig(**SMALL, **factors, attention_multiplier=0.1)
    )
    module.save_pretrained(tmp_path)
    weights = FolderWeights(load_model(tmp_path))
    block, q = module.model.layers[1], 24
    plain = weights.stored(1, "qkv.weight")
    assert torch.equal(plain[:q], block.self_attn.q_proj.weight)
    qkv = weights.tensor(1, "qkv.weight")
    torch.testing.assert_close(qkv[:q], plain[:q] * 0.1 * 4**0.5)
    assert torch.equal(qkv[q:], plain[q:])
    assert torch.equal(weights.tensor(1, "down.weight"), block.mlp.down_proj.weight * 0.5)
    head = weights.tensor("head", "head.weight")
    assert torch.equal(head, module.lm_head.weight / 4)
    assert torch.equal(torch.cat([*weights.slices("head", "head.weight", 7)]), head)
    pieces = torch.cat([*weights.slices(1, "qkv.weight", 7)])
    assert torch.equal(pieces, qkv)


def test_random_weights_are_a_function_of_seed_layer_and_name() -> None:
    model = load_model("tiny-llama-random")
    first, again, other = (RandomWeights(model, seed=seed) for seed in (1, 1, 2))
    weight = first.tensor(3, "qkv.weight")
    assert torch.equal(weight, again.tensor(3, "qkv.weight"))
    assert not torch.equal(weight, other.tensor(3, "qkv.weight"))
    assert not torch.equal(weight, first.tensor(4, "qkv.weight"))
    assert weight.shape == (512, 256)
    assert weight.dtype == torch.float32
    # A frozen digest: the same bits on every machine and on every device.
    assert digest(weight) == "8ab73462090637b5"


def test_random_bits_are_a_wrapping_hash_of_key_and_index() -> None:
    """The docstring's words in numpy's unsigned integers."""
    first, second = np.frombuffer(hashlib.blake2b(b"key", digest_size=8).digest(), dtype="<u4")
    x = np.arange(70_000, dtype=np.uint32) ^ first
    x ^= x >> 16
    x *= np.uint32(0x7FEB352D)
    x ^= second
    x ^= x >> 15
    x *= np.uint32(0x846CA68B)
    x ^= x >> 16
    total = sum((x >> shift & 255).astype(np.int64) for shift in (0, 8, 16, 24)) - 510
    made = bell_shaped("key", (70_000,), torch.float32)
    assert np.array_equal(made.numpy(), total.astype(np.float32) * np.float32(0.02 / 147.8005))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_makes_the_bits_of_the_processor() -> None:
    model = load_model("tiny-llama-random")
    here = RandomWeights(model, seed=3).tensor("head", "head.weight")
    there = RandomWeights(model, seed=3, device="cuda:0").tensor("head", "head.weight")
    assert torch.equal(here, there.cpu())


def test_random_weights_are_scaled_like_transformers() -> None:
    weights = RandomWeights(load_model("tiny-llama-random"), seed=0)
    head = weights.tensor("head", "head.weight")
    assert head.mean().abs() < 1e-4
    assert abs(head.std() - 0.02) < 1e-4
    assert torch.equal(weights.tensor(0, "norm1.weight"), torch.ones(256))
    assert not torch.equal(head, weights.tensor("embedding", "embed.weight"))
    tied = RandomWeights(load_model("gpt2").model_copy(update={"vocab": 100}), seed=0)
    embedding = tied.tensor("embedding", "embed.weight")
    assert torch.equal(tied.tensor("head", "head.weight"), embedding)
    assert not tied.tensor(0, "qkv.bias").any()


def test_dtype_rounds_the_same_values() -> None:
    model = load_model("tiny-llama-random")
    full = RandomWeights(model, seed=5).tensor(0, "down.weight")
    half = RandomWeights(model, seed=5, dtype="bf16").tensor(0, "down.weight")
    assert torch.equal(half, full.to(torch.bfloat16))


@pytest.mark.parametrize("name", ["llama-folder", "random"])
def test_slices_join_to_the_tensor(name: str, tmp_path: Path) -> None:
    if name == "random":
        weights = open_weights(load_model("tiny-llama-random"))
    else:
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).save_pretrained(tmp_path)
        weights = open_weights(load_model(tmp_path))
    for part, tensor in ((0, "qkv.weight"), (1, "norm1.weight"), ("head", "head.weight")):
        whole = weights.tensor(part, tensor)
        pieces = list(weights.slices(part, tensor, 7))
        assert weights.shape(part, tensor) == whole.shape
        assert {len(piece) for piece in pieces[:-1]} == {7}
        assert torch.equal(torch.cat(pieces), whole)
