"""Which passes end in logits, so that a training step has a loss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.datasets.graphs.capture import capture


class Ends(nn.Module):
    """A linear layer, and what comes behind it."""

    def __init__(self, behind: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.head, self.behind = nn.Linear(16, 16, bias=False), behind
        self.register_buffer("bias", torch.ones(1, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.head(x), self.bias)


@pytest.mark.parametrize(
    ("behind", "logits"),
    [
        (lambda x, _: x, True),
        (lambda x, bias: x + bias, True),
        (lambda x, _: 30 * torch.tanh(x / 30), True),
        (lambda x, _: x + x.flip(0), False),
        (lambda x, _: torch.relu(x), False),
    ],
)
def test_a_pass_that_ends_in_logits_has_a_loss(
    behind: Callable[[Tensor, Tensor], Tensor], logits: bool
) -> None:
    steps = lower(capture(Ends(behind), [torch.rand(4, 16)], eager=True), "training")
    losses = [step for step in steps if step.target == "cross_entropy"]
    assert len(losses) == 3 * logits
    assert all(step.work.dims["cols"] == 16 for step in losses)  # type: ignore[union-attr]
