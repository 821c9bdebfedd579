"""A host's prices: in a GPU's profile, in `foreplan predict`, for the simulator's host queue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foreplan.cost_models.lowering.graph_step import PHASES, Phase
from foreplan.cost_models.lowering.step_store import stored_steps
from foreplan.cost_models.passes import host_measuring
from foreplan.cost_models.passes.host_prices import MODES, HostPrices, Issue
from foreplan.cost_models.predict_command import predict_model
from foreplan.cost_models.replay import predict_latency
from foreplan.datasets import device_zoo
from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.profile import HostTimes, Profile
from foreplan.datasets.program import Variant
from foreplan.errors import MissingDataError, SpecError

CALL_S = {
    "view": dict.fromkeys(MODES, 1e-6), "add": dict.fromkeys(MODES, 5e-6),
    "linear": {"inference": 8e-6, "forward": 9e-6, "backward": 20e-6},
    "layer_norm": {"inference": 7e-6, "forward": 8e-6, "backward": 15e-6},
}  # fmt: skip
TIMES: dict[str, Any] = {
    "call_s": CALL_S, "update_s": [1e-4, 1e-6],
    "factor": {"inference": 1.5, "forward": 1.25, "backward": 1.0},
    "line_s": dict.fromkeys(MODES, 0.0),
}  # fmt: skip
BF16 = Variant("bf16", "bf16", "torch.linear")


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    device = device_zoo.device("h200").model_copy(update={"name": "cuda:0"})
    host = HostTimes.model_validate(TIMES, strict=False)
    path = tmp_path / "cuda-0.json"
    Profile(device=device, software={}, host=host).save(path)
    return path


@pytest.mark.parametrize("phase", PHASES)
def test_predict_takes_the_host_of_a_profile(
    profile: Path, phase: Phase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREPLAN_CACHE", str(tmp_path / "cache"))
    found = predict_model("gpt2", [], profile=profile, costs="roofline", phase=phase,
                          sequence_length=8)  # fmt: skip
    assert found["captured"] == "now"
    steps, kept = stored_steps(load_model("gpt2"), batch=1, tokens=8, phase=phase)
    assert kept
    prices = HostPrices.load(TIMES)
    seconds = sum(prices.part_seconds(Issue.of(steps), phase).values())
    assert found["devices"][0]["host_s"] == pytest.approx(seconds)
    given = predict_model("gpt2", [], profile=profile, costs="roofline", phase=phase,
                          sequence_length=8, launch_s=1e-6)  # fmt: skip
    assert given["devices"][0]["host_s"] < found["devices"][0]["host_s"]


def test_python_takes_the_host_of_a_profile_as_the_command_does(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREPLAN_CACHE", str(tmp_path / "cache"))
    known = Profile.load(profile)
    for phase in PHASES:
        by_command = predict_model("tiny-llama-random", ["h200"], profile=profile, phase=phase)
        found = predict_latency("tiny-llama-random", "h200", profile=known, phase=phase)
        assert found.host_s == pytest.approx(by_command["devices"][0]["host_s"])
        of_file = predict_latency("tiny-llama-random", "h200", profile=str(profile), phase=phase)
        assert of_file.latency_s == found.latency_s
        usual = predict_latency("tiny-llama-random", "h200", phase=phase)
        assert found.host_s != pytest.approx(usual.host_s, rel=0.01)


def test_a_profile_prices_no_other_chip(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured on an H200 is no price of an L4, though it may stand for another GH100."""
    monkeypatch.setenv("FOREPLAN_CACHE", str(tmp_path / "cache"))
    for device in ("h200", "h100_sxm"):
        found = predict_model("tiny-llama-random", [device], profile=profile, costs="measured")
        assert found["devices"][0]["device"] == device
    for device in ("l4", "epyc_9654"):
        with pytest.raises(SpecError, match=r"profile: got 'one of cuda:0 \(gh100\)'"):
            predict_model("tiny-llama-random", [device], profile=profile, costs="measured")
        with pytest.raises(SpecError, match=r"profile: got 'one of cuda:0 \(gh100\)'"):
            predict_latency("tiny-llama-random", device, profile=Profile.load(profile))


def test_a_profile_keeps_its_host(profile: Path) -> None:
    host = Profile.load(profile).host
    assert host is not None
    assert HostPrices.load(host.model_dump()) == HostPrices.load(TIMES)
    text = (
        profile.read_text().replace("20e-6", "-1").replace("0.00002", "-1").replace("2e-05", "-1")
    )
    profile.write_text(text)
    with pytest.raises(SpecError, match="backward"):
        Profile.load(profile)


def test_a_host_that_cannot_be_measured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_measuring, "worker_environment", lambda _: {"PATH": "/nowhere"})
    with pytest.raises(MissingDataError, match="no prices of its host"):
        host_measuring.measure_host(DeviceName.parse("cuda:7"), timeout_s=0.01)
