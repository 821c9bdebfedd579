from __future__ import annotations

import pytest

from foreplan.cost_models.pipeline_step import simulate_pipeline
from foreplan.errors import SpecError


def test_a_row_of_the_zero_bubble_paper() -> None:
    result = simulate_pipeline(
        "zb-h2", stages=8, microbatches=24, forward_s=18.522e-3, backward_input_s=18.086e-3,
        backward_weight_s=9.337e-3, transfer_s=0.601e-3,
    )  # fmt: skip
    assert round(result.bubble_rate, 4) == 0.1083
    assert result.iteration_s == pytest.approx(24 * 45.945e-3 / (1 - 0.1083), rel=1e-3)
    assert result.makespan_s >= result.iteration_s
    assert max(result.peak_activations) == 15
    assert list(result.document()) == [
        "bubble_rate", "iteration_s", "makespan_s", "peak_activations",
    ]  # fmt: skip


def test_times_and_peaks_with_chunks() -> None:
    """Times are per chunk; a chunk's activations are half a micro-batch's."""
    result = simulate_pipeline(
        "interleaved-1f1b", stages=4, microbatches=8, chunks=2, forward_s=1.0,
        backward_input_s=1.0, backward_weight_s=1.0,
    )  # fmt: skip
    assert result.bubble_rate == pytest.approx(3 / (2 * 8 + 3))
    assert result.iteration_s == result.makespan_s == pytest.approx(57.0)
    # Warm-up of rank r plus the forward of its first pair, in chunks: (10, 8, 6, 4) + 1.
    assert result.peak_activations == (5.5, 4.5, 3.5, 2.5)


def test_bad_times_and_sizes() -> None:
    times = {"forward_s": 1.0, "backward_input_s": 1.0, "backward_weight_s": 1.0}
    with pytest.raises(SpecError, match="a multiple of the 4 stages"):
        simulate_pipeline("interleaved-1f1b", stages=4, microbatches=6, chunks=2, **times)
    with pytest.raises(SpecError, match="pipeline transfer time: got -1"):
        simulate_pipeline("1f1b", stages=4, microbatches=6, transfer_s=-1.0, **times)


def test_sizes_and_times_beyond_all_bounds() -> None:
    """Refused before anything is built for each stage, and before a time becomes infinite."""
    times = {"forward_s": 1.0, "backward_input_s": 1.0, "backward_weight_s": 1.0}
    with pytest.raises(SpecError, match="stages x microbatches x chunks: got 8000000000000000"):
        simulate_pipeline("1f1b", stages=10**15, microbatches=8, **times)
    long = dict.fromkeys(times, 1e305)
    with pytest.raises(SpecError, match="pipeline times: got inf"):
        simulate_pipeline("1f1b", stages=2, microbatches=2000, **long)
