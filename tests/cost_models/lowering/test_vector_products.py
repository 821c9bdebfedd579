"""Products of two vectors: sums over both, by no kernel for matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import foreplan
from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import Program


class Dot(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return (2.0 * self.weight) @ x.tanh()


@pytest.mark.parametrize("made", [Dot(300), nn.Linear(300, 1, bias=False)])
def test_forward_one_sum_and_backward_a_map_each(made: nn.Module) -> None:
    x = torch.zeros(300) if isinstance(made, Dot) else torch.zeros(1, 300)
    steps = lower(capture(made, [x], eager=True, training=True), "training")
    forward = [s.work for s in steps if s.part == "forward" and s.kind in ("linear", "matmul")]
    assert [(w.op, dict(w.dims)) for w in forward if isinstance(w, Program)] == [
        ("reduction", {"rows": 1, "cols": 600})
    ]
    maps = [
        s for s in steps
        if s.part == "backward" and isinstance(s.work, Program) and s.work.op == "elementwise"
        and s.work.dims["rows"] * s.work.dims["cols"] == 300
    ]  # fmt: skip
    # By what is trained alone; the dot's other operand has no gradient, and its weights are scaled.
    assert len(maps) == 1 + isinstance(made, Dot)


def test_long_ones_are_bound_by_memory_on_every_board() -> None:
    """They came out a hundred times as long as their bytes take, and an A100 behind a T4."""
    size = 1_000_000
    found = {
        board: foreplan.predict_latency(
            Dot(size), board, inputs=[torch.zeros(size)], execution="graph"
        ).latency_s
        for board in ("t4", "a100_sxm_80gb", "h200", "b200")
    }
    assert found["t4"] > found["a100_sxm_80gb"] > found["h200"] >= 0.8 * found["b200"]
    assert found["h200"] < 1e-4
