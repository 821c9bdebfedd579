"""Programs that only a call's arguments tell: norms of groups of channels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.predictor import Predictor
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import Program


@pytest.mark.parametrize(
    ("norm", "rows", "cols"),
    [(nn.GroupNorm(4, 16), 3 * 4, 4 * 64), (nn.GroupNorm(1, 16), 3, 16 * 64),
     (nn.InstanceNorm2d(16, affine=True), 3 * 16, 64)],
)  # fmt: skip
def test_a_norm_of_groups_norms_all_pixels_of_its_channels(
    norm: nn.Module, rows: int, cols: int
) -> None:
    module = nn.Sequential(nn.Conv2d(8, 16, 1), norm)
    steps = lower(capture(module, [torch.rand(3, 8, 8, 8)], eager=True), "training")
    works = [step.work for step in steps if step.target.endswith("_norm")]
    forward, back = (work for work in works if isinstance(work, Program) and "norm" in work.op)
    assert (forward.op, forward.dims) == ("norm", {"rows": rows, "cols": cols})
    assert back.op == "norm_gradient"
    assert back.dims["rows"] == rows


@pytest.mark.parametrize(
    ("shape", "measured_s"), [((48, 64, 48, 48), 82e-6), ((48, 320, 12, 12), 29e-6)]
)
def test_an_h200_norms_whole_images_in_the_time_of_long_rows(
    shape: tuple[int, ...], measured_s: float
) -> None:
    module = nn.GroupNorm(1, shape[1], device="meta", dtype=torch.bfloat16)
    images = torch.empty(shape, device="meta", dtype=torch.bfloat16)
    (step,) = lower(capture(module, [images], eager=True))
    assert isinstance(step.work, Program)
    price = Predictor.load().predict([step.work], "h200")[0].mean_s
    assert measured_s / 1.4 < price < 1.4 * measured_s
