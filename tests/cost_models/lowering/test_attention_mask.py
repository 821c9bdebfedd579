"""What is added to an attention's scores: read off a trace, carried in a name, told to a table."""

from __future__ import annotations

import itertools
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foreplan.cost_models.lowering.attention_mask import AttentionMask
from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.lowering.graph_step import Phase
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import Program

BATCH, HEADS, TOKENS, WIDTH = 3, 2, 8, 4


class Attending(nn.Module):
    """One attention with something added, made from a parameter or a given tensor."""

    def __init__(self, mask: Tensor, *, learned: bool = False) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        if learned:
            self.mask = nn.Parameter(mask)
        else:
            self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        """x[B, H, T, D] to the same."""
        q = self.project(x)
        return F.scaled_dot_product_attention(q, x, x, attn_mask=self.mask)


def seen(module: nn.Module, phase: Phase = "inference") -> list[AttentionMask | None]:
    """Of the attention, and of its gradient in a training step."""
    x = torch.rand(BATCH, HEADS, TOKENS, WIDTH)
    works = [step.work for step in lower(capture(module, (x,), eager=True), phase)]
    return [
        AttentionMask.of_kernel(work.variant.kernel)
        for work in works
        if isinstance(work, Program) and "attention" in work.op
    ]


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        (torch.zeros(TOKENS, TOKENS), AttentionMask()),
        (torch.zeros(1, HEADS, TOKENS, TOKENS), AttentionMask(heads=True)),
        (torch.zeros(BATCH, 1, TOKENS, TOKENS), AttentionMask(batch=True)),
        (torch.zeros(BATCH, 1, 1, TOKENS).expand(-1, HEADS, TOKENS, -1),
         AttentionMask(batch=True, broadcast=True)),
        (torch.zeros(BATCH, HEADS, TOKENS, TOKENS), AttentionMask(batch=True, heads=True)),
        (torch.zeros(TOKENS, TOKENS, HEADS).permute(2, 0, 1)[None],
         AttentionMask(heads=True, strided=True)),
        (torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool), AttentionMask(boolean=True)),
    ],
)  # fmt: skip
def test_a_trace_says_what_is_added_and_how_it_lies(mask: Tensor, found: AttentionMask) -> None:
    assert seen(Attending(mask)) == [found]


def test_what_is_learned_has_a_gradient_in_a_training_step_alone() -> None:
    bias = torch.zeros(1, HEADS, TOKENS, TOKENS)
    learned = AttentionMask(heads=True, learned=True)
    assert seen(Attending(bias, learned=True)) == [AttentionMask(heads=True)]
    assert seen(Attending(bias, learned=True), "training") == [learned, learned]
    assert seen(Attending(bias), "training") == [AttentionMask(heads=True)] * 2


def test_nothing_added_is_no_mask() -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return F.scaled_dot_product_attention(x, x, x)

    assert seen(Plain()) == [None]


def test_every_mask_can_be_read_from_the_name_of_its_kernel() -> None:
    names = [field.name for field in fields(AttentionMask)]
    for values in itertools.product((False, True), repeat=len(names)):
        mask = AttentionMask(**dict(zip(names, values, strict=True)))
        assert AttentionMask.of_kernel(f"torch.scaled_dot_product_attention{mask.word}") == mask
    assert AttentionMask.of_kernel("torch.scaled_dot_product_attention") is None


def test_sizes_count_the_values_that_sequences_and_heads_have_of_their_own() -> None:
    assert AttentionMask().sizes(3, 2)["masks"] == 1
    assert AttentionMask(batch=True).sizes(3, 2)["masks"] == 3
    assert AttentionMask(batch=True, heads=True).sizes(3, 2)["masks"] == 6
