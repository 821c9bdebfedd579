from __future__ import annotations

import pytest

from foreplan.cost_models.mfu import (
    decoder_parameters,
    model_flops_utilisation,
    training_flops_per_token,
)
from foreplan.errors import SpecError

# MegaScale, table 2: 175B, sequence 2048. Batch, GPUs, seconds, the MFU it reports, and ours.
ROWS = [
    (768, 256, 40.0, 53.0, 53.0),
    (6144, 12288, 8.57, 41.2, 41.3),
    (6144, 12288, 6.34, 55.2, 55.8),
    (768, 256, 32.0, 65.3, 66.3),
]


@pytest.mark.parametrize(("batch", "devices", "seconds", "reported", "ours"), ROWS)
def test_megascale(batch: int, devices: int, seconds: float, reported: float, ours: float) -> None:
    parameters = decoder_parameters(layers=96, hidden=12288, vocabulary=64000)
    assert parameters == pytest.approx(175e9, rel=0.01)
    flops = training_flops_per_token(parameters=parameters, layers=96, hidden=12288, sequence=2048)
    share = model_flops_utilisation(
        flops_per_token=flops, tokens=batch * 2048, step_s=seconds, devices=devices,
        peak_flops=312e12,
    )  # fmt: skip
    assert round(100 * share, 1) == ours
    assert 100 * share == pytest.approx(reported, rel=0.016)


@pytest.mark.parametrize("wrong", [{"step_s": 0.0}, {"devices": 0}, {"peak_flops": float("nan")}])
def test_bad_figures(wrong: dict[str, float]) -> None:
    figures = {
        "flops_per_token": 1.0, "tokens": 1.0, "step_s": 1.0, "devices": 1, "peak_flops": 1.0,
    }  # fmt: skip
    with pytest.raises(SpecError, match=next(iter(wrong))):
        model_flops_utilisation(**{**figures, **wrong})  # type: ignore[arg-type]
