"""What a ``config.json`` leaves out is what transformers' class of the family takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from foreplan.datasets.models.families import ARCHITECTURES
from foreplan.datasets.models.load_model import load_model
from foreplan.errors import SpecError

#: Sizes that every file states, and what else has no default, or none that divides another.
STATED = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
ALSO = {"deepseek_v2": {"num_experts_per_tok": 6}, "glm4_moe": {"head_dim": 128}}
#: Without a class in transformers, or with names of their own for sizes.
OTHERS = {"deepseek", "opt", "gpt2", "gpt_neox"}


def write(folder: Path, **fields: object) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("family", sorted(set(ARCHITECTURES) - OTHERS))
def test_defaults_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    also = ALSO.get(family, {})
    theirs = transformers.AutoConfig.for_model(family, **also)
    stated = {name: getattr(theirs, name) for name in STATED} | also
    ours = load_model(write(tmp_path, model_type=family, **stated))
    assert ours.kv_heads == theirs.num_key_value_heads
    assert ours.norm_eps == (getattr(theirs, "norm_epsilon", None) or theirs.rms_norm_eps)
    assert ours.tied == theirs.tie_word_embeddings
    if ours.latent is None:
        share = theirs.hidden_size // theirs.num_attention_heads
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or share)


def test_key_heads_that_transformers_would_take_but_cannot_share_are_asked_for(
    tmp_path: Path,
) -> None:
    fields = dict.fromkeys(STATED, 48) | {"model_type": "qwen2", "num_attention_heads": 6}
    with pytest.raises(SpecError, match=r"num_key_value_heads: got nothing.* takes 32$"):
        load_model(write(tmp_path, **fields))
    model = load_model(write(tmp_path, **fields, num_key_value_heads=None))
    assert model.kv_heads == model.heads == 6
