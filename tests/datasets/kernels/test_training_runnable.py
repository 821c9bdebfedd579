"""Programs of a training step compute on operands that lie as a step's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from foreplan.datasets.kernels.training_runnable import training_call
from foreplan.datasets.program import Variant, program


@pytest.mark.parametrize(
    ("rows", "plane"), [(4096, 256), (16 * 49, 196), (251, 251), (521, 1), (2 * 521, 2)]
)
def test_a_batch_norm_is_timed_on_whole_planes(
    rows: int, plane: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a convolution leaves them: channels that lie side by side take several times as long."""
    seen: list[torch.Tensor] = []
    norm: Any = F.batch_norm

    def batch_norm(x: torch.Tensor, *rest: object) -> Any:
        seen.append(x)
        return norm(x, *rest)

    monkeypatch.setattr(F, "batch_norm", batch_norm)
    variant = Variant("fp32", "fp32", "torch.batch_norm")
    for way in ("forward", "backward"):
        training_call(program(f"norm_{way}", variant, rows=rows, cols=3), "cpu")
    assert {tuple(x.shape) for x in seen} == {(rows // plane, 3, plane)}
    assert all(x.is_contiguous() for x in seen)
