"""Batch norms whose channels are summed up by a block each."""

from __future__ import annotations

from foreplan.cost_models.predictor import Predictor
from foreplan.datasets.program import CHANNELS_LAST, Program, Variant, program


def gradient(channels: int, images: int, pixels: int, layout: str = "") -> Program:
    kernel = Variant("bf16", "bf16", f"torch.backward{layout}")
    return program(
        "norm_gradient", kernel, rows=images * channels, cols=pixels, channels=channels, results=2
    )


def seconds(*asked: Program) -> list[float]:
    return [price.mean_s for price in Predictor.load().predict(asked, "h200")]


def test_few_channels_leave_most_of_a_gpu_idle() -> None:
    few, more, last = seconds(
        gradient(16, 64, 4096), gradient(64, 64, 4096), gradient(16, 64, 4096, CHANNELS_LAST)
    )
    # 262,144 values a channel, whichever block goes through them: some 0.9 ns each.
    assert 0.35 < few / more < 1.2  # four times the work
    assert 150e-6 < few < 500e-6
    # Kernels for channels last share a channel out.
    assert last < few / 3


def test_a_block_takes_as_long_as_its_channel() -> None:
    short, long = seconds(gradient(64, 16, 4096), gradient(64, 128, 4096))
    assert 5 < long / short < 25  # eight times, no longer from the caches
