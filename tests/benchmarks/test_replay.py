"""Speed of predicting a 32-layer Llama: captured now, read from disk, and asked again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foreplan.cost_models.lowering.graph_programs import model_steps
from foreplan.cost_models.lowering.step_store import stored_steps
from foreplan.cost_models.predictor import Predictor
from foreplan.cost_models.replay import replay_book, replay_steps
from foreplan.datasets import device_zoo
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.model import Model

MOST_WARM_S = 0.3


@pytest.fixture(scope="module")
def llama() -> Model:
    return load_model("llama-2-7b")


def test_warm_prediction(benchmark: Any, llama: Model) -> None:
    steps = model_steps(llama, batch=1, tokens=512)
    device, predictor = device_zoo.device("h200"), Predictor.load()

    def predict() -> float:
        return replay_steps(steps, replay_book(device, predictor=predictor), device).latency_s

    assert benchmark(predict) > 0
    if benchmark.stats is not None:
        assert benchmark.stats["median"] < MOST_WARM_S


@pytest.mark.parametrize("phase", ["inference", "training"])
def test_capture(benchmark: Any, llama: Model, phase: Any) -> None:
    steps = benchmark(model_steps, llama, batch=1, tokens=512, phase=phase)
    assert len(steps) > 32 * 20


def test_reading_captured_steps(benchmark: Any, llama: Model, tmp_path: Path) -> None:
    stored_steps(llama, batch=1, tokens=512, phase="inference", folder=tmp_path)
    _, cached = benchmark(
        stored_steps, llama, batch=1, tokens=512, phase="inference", folder=tmp_path
    )
    assert cached
