"""Layers that a training step computes again are refused, and nothing else is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from foreplan.datasets.graphs.capture import capture
from foreplan.errors import SpecError


class Again(nn.Module):
    """Layers behind a checkpoint."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.layers, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_step_that_computes_layers_again_is_refused(use_reentrant: bool) -> None:
    inputs = [torch.zeros(4, 8)]
    with pytest.raises(SpecError, match=r"activation checkpointing.*turn it off"):
        capture(Again(use_reentrant), inputs, training=True)
    # torch is as it was: the module trains, and inference computes each layer once anyway.
    Again(use_reentrant)(torch.zeros(4, 8, requires_grad=True)).sum().backward()
    plain = capture(Again(use_reentrant).layers, inputs)
    again = capture(Again(use_reentrant), inputs)
    assert len(list(again.operators("linear"))) == len(list(plain.operators("linear"))) == 2


def test_transformers_layers_are_refused_too() -> None:
    config = transformers.GPT2Config(
        n_embd=16,
        n_layer=2,
        n_head=2,
        vocab_size=32,
        n_positions=16,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.GPT2LMHeadModel(config)
    tokens = {"input_ids": torch.zeros(1, 4, dtype=torch.int64)}
    capture(model, tokens, training=True)
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)()
    with pytest.raises(SpecError, match="activation checkpointing"):
        capture(model, tokens, training=True)
