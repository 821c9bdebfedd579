"""Regions of a trace are put in line; an autocast that is on is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from foreplan.datasets.graphs.capture import capture
from foreplan.errors import SpecError

ROWS = torch.rand(4, 8)


class Cast(nn.Module):
    """A linear under an autocast."""

    def __init__(self, device: str, *, on: bool = True) -> None:
        super().__init__()
        self.layer, self.device, self.on = nn.Linear(8, 8), device, on

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.on):
            out: Tensor = self.layer(x)
        return out + 1.0


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])  # of GPUs that are not here, too
def test_an_autocast_is_refused(device: str, training: bool) -> None:
    with pytest.raises(SpecError, match=r"autocast.*convert module and inputs"):
        capture(Cast(device), (ROWS,), eager=True, training=training)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_autocast_that_is_off_is_no_region(device: str) -> None:
    graph = capture(Cast(device, on=False), (ROWS,), eager=True)
    assert [(node.target, node.module) for node in graph.operators()][1:] == [
        ("aten.linear", "layer"), ("aten.add", ""),
    ]  # fmt: skip
