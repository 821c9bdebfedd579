"""Layers that a training step computes again are noted, and nothing else is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.graphs.operator_graph import Recomputation
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
def test_a_step_notes_what_is_computed_again(use_reentrant: bool) -> None:
    module = Again(use_reentrant)
    inputs = [torch.zeros(4, 8)]
    graph = capture(module, inputs, training=True)
    found = {node.recomputations for node in graph.operators() if node.op != "input"}
    assert found == {(Recomputation(0, early=not use_reentrant),)}
    # torch is as it was: the module trains, and inference computes each layer once anyway.
    module(torch.zeros(4, 8, requires_grad=True)).sum().backward()
    plain, again = capture(module.layers, inputs), capture(module, inputs)
    assert len(list(again.operators("linear"))) == len(list(plain.operators("linear"))) == 2
    assert not any(node.recomputations for node in again.operators())


def test_transformers_layers_are_noted_too() -> None:
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=16, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    tokens = {"input_ids": torch.zeros(1, 4, dtype=torch.int64)}
    plain = capture(model, tokens, training=True)
    assert not any(node.recomputations for node in plain.operators())
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)()
    graph = capture(model, tokens, training=True)
    assert len({node.recomputations for node in graph.operators() if node.recomputations}) == 2


def test_checkpoints_that_choose_what_they_keep_are_refused() -> None:
    layer = nn.Linear(8, 8)

    def contexts() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.layer, x, use_reentrant=False, context_fn=contexts)

    with pytest.raises(SpecError, match=r"context_fn.*leave context_fn out"):
        capture(Chosen(), [torch.zeros(4, 8)], training=True)
