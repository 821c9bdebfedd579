"""What Python is asked of a pass as the command line is, and what contradicts itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import foreplan
from foreplan.cost_models.pass_arguments import named_devices
from foreplan.errors import ForeplanError, SpecError

INPUTS = (torch.zeros(4, 8),)


def latency_s(**fields: Any) -> float:
    return foreplan.predict_latency(nn.Linear(8, 8), "l4", inputs=INPUTS, **fields).latency_s


def test_a_predictor_may_be_named() -> None:
    assert latency_s(predictor="pretrained:ops") == latency_s()
    model = foreplan.load_model("tiny-llama-random")
    named, shipped = (
        foreplan.rank_devices(model, "l4", predictor=name).fastest.latency_s
        for name in ("pretrained:ops", None)
    )
    assert named == shipped


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"predictor": "pretrained:nope"}, "no shipped model 'pretrained:nope'"),
        (
            {"predictor": Path("nope")},
            "got 'nope', expected pretrained:ops, pretrained:programs or",
        ),
        ({"predictor": 3}, r"predict_latency: predictor: got 'int', expected what Predictor\.load"),
        ({"profile": "nope.json"}, "nope.json: got 'No such file"),
        ({"profile": 3}, r"predict_latency: profile: got 'int', expected what Profile\.load"),
    ],
)
def test_wrong_files_are_told(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ForeplanError, match=told):
        latency_s(**fields)


@pytest.mark.parametrize("name", ["batch", "sequence_length"])
def test_a_module_takes_its_shapes_from_its_inputs_alone(name: str) -> None:
    for size in (1, 128):  # what a described model has if nobody says it, too
        with pytest.raises(SpecError, match=f"{name}: got {size}, expected none, .* own shapes"):
            latency_s(**{name: size})


@pytest.mark.parametrize("given", ["a", [1e-6, 1e-6], True])
def test_a_ranking_takes_one_number_of_the_host(given: Any) -> None:
    with pytest.raises(SpecError, match=r"rank_devices: launch_s: got .* expected .*number"):
        foreplan.rank_devices("tiny-llama-random", "t4", launch_s=given)


def test_all_devices_may_stand_beside_named_ones() -> None:
    every = [device.name for device in named_devices(["all"], where="devices")]
    assert [device.name for device in named_devices(["all,l4"], where="devices")] == every
    found = named_devices(["l4", "all"], where="devices")
    assert found[0].name == "l4"
    assert sorted(device.name for device in found) == sorted(every)
