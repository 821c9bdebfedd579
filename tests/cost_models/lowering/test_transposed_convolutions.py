"""A transposed convolution computes what the input's gradient of another one does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.lowering.graph_step import Phase
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import Program


def convolutions(module: nn.Module, x: torch.Tensor, phase: Phase) -> list[Program]:
    # A layer in front, so that its input has a gradient.
    network = nn.Sequential(nn.Tanh(), module) if phase == "inference" else nn.Sequential(
        nn.Conv2d(x.shape[1], x.shape[1], 1), module
    )  # fmt: skip
    graph = capture(network, [x], eager=True, training=phase == "training")
    works: list[Any] = [step.work for step in lower(graph, phase)]
    return [work for work in works if work.op == "conv" and work.dims["taps"] == 16]


@pytest.mark.parametrize("groups", [1, 4])
def test_of_the_convolution_the_other_way(groups: int) -> None:
    up = nn.ConvTranspose2d(8, 16, 4, 2, 1, groups=groups, bias=False)
    down = nn.Conv2d(16, 8, 4, 2, 1, groups=groups, bias=False)
    small, large = torch.zeros(3, 8, 5, 7), torch.zeros(3, 16, 10, 14)
    (forward,) = convolutions(up, small, "inference")
    plain, by_input, by_weight = convolutions(down, large, "training")
    assert forward == by_input
    assert forward.dims["groups"] == groups
    assert set(convolutions(up, small, "training")) == {forward, plain, by_weight}


def test_a_bias_is_summed_over_what_is_written() -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ConvTranspose2d(8, 16, 4, 2, 1))
    graph = capture(module, [torch.zeros(3, 3, 5, 7)], eager=True, training=True)
    works = [step.work for step in lower(graph, "training") if isinstance(step.work, Program)]
    sums = [dict(w.dims) for w in works if w.variant.kernel == "torch.backward_by_channel"]
    assert {"rows": 16, "cols": 3 * 10 * 14} in sums
