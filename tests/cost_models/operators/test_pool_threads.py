"""Pools and their gradients: a thread for each result, which goes through its window."""

from __future__ import annotations

import torch
from torch import nn

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.predictor import Predictor
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import Program, Variant, program


def pool(op: str, kernel: str, *, window: int, stride: int) -> Program:
    variant = Variant("bf16", "bf16", f"torch.{kernel}")
    return program(op, variant, rows=64 * 64 * 56**2, cols=stride**2, taps=window**2)


def test_an_h200_takes_longer_for_windows_than_for_their_bytes() -> None:
    forward, back, wide, mean = (
        price.mean_s
        for price in Predictor.load().predict(
            [
                pool("pool", "max_pool2d", window=3, stride=2),
                pool("pool_gradient", "max_pool2d_backward", window=3, stride=2),
                pool("pool", "max_pool2d", window=7, stride=2),
                pool("pool", "avg_pool2d", window=3, stride=2),
            ],
            "h200",
        )
    )
    outputs = 64 * 64 * 56**2
    # Measured of such images: 16, 47, 48 and 13 ns a thousand outputs; bytes are 4 of them.
    assert 13e-12 < forward / outputs < 19e-12
    assert 38e-12 < back / outputs < 56e-12
    assert 2.5 * forward < wide < 3.6 * forward
    assert mean < forward


def test_a_pool_goes_back_as_a_pool() -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(3, 2, 1))
    steps = lower(capture(module, [torch.rand(2, 3, 34, 34)]), "training")
    works = [s.work for s in steps if isinstance(s.work, Program) and s.work.op.startswith("pool")]
    forward, back = works
    assert forward.dims == back.dims == {"rows": 2 * 8 * 16 * 16, "cols": 4, "taps": 9}
    assert (back.op, back.variant.kernel) == ("pool_gradient", "torch.max_pool2d_backward")


def test_a_window_larger_than_the_image_ends_with_it() -> None:
    steps = lower(
        capture(nn.AvgPool2d(1280, ceil_mode=True), [torch.rand(2, 8, 6, 6)]), "inference"
    )
    (work,) = [step.work for step in steps if isinstance(step.work, Program)]
    assert work.dims == {"rows": 16, "cols": 36, "taps": 36}


def test_an_interpolated_image_takes_a_window_an_element() -> None:
    def upsample(kernel: str) -> Program:
        variant = Variant("bf16", "bf16", f"torch.{kernel}")
        return program("elementwise", variant, rows=8 * 64 * 128, cols=128, inputs=1)

    found = Predictor.load().predict(
        [upsample(name) for name in ("upsample_bilinear2d", "upsample_bicubic2d", "mul")], "h200"
    )
    bilinear, bicubic, plain = (price.mean_s for price in found)
    assert 107e-6 / 1.35 < bilinear < 1.35 * 107e-6  # measured
    assert plain < bilinear / 5 < bicubic / 5
