"""``foreplan predict`` of networks known by name, and of a user's own file, as a user runs it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from foreplan import cli
from foreplan.cost_models.ranking import rank_devices
from foreplan.cost_models.replay import predict_latency
from foreplan.datasets.device import Device
from foreplan.errors import SpecError

NET = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(64, 64)
    def forward(self, x):
        print("in forward")
        return self.body(x).relu()
def example_inputs(batch=1):
    return torch.zeros(batch, 64)
class Ends(Net):
    def forward(self, x):
        raise SystemExit("that was all")
class Turns(Net):
    def forward(self, x):
        return x if x.sum() > 0 else self.body(x)
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """``foreplan predict`` from published figures; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FOREPLAN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "net.py").write_text(NET)

    def call(*words: str) -> tuple[int, str, str]:
        argv = ["foreplan", "predict", *words, "--costs", "roofline"]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as stop:
            cli.main()
        shown = capsys.readouterr()
        return int(stop.value.code or 0), shown.out, shown.err

    return call


def test_a_network_by_name_is_captured_once(run: Run) -> None:
    for captured in ("now", "cache"):
        code, out, _ = run("ResNet18", "-d", "l4,h200", "--batch", "2", "--json")
        found = json.loads(out)
        assert (code, found["captured"]) == (0, captured)
    assert (found["model"], found["shape"]) == ("resnet-18", "2 images of 224 x 224")
    assert (found["batch"], found["sequence_length"], found["dtype"]) == (2, None, "fp32")
    smaller = json.loads(run("resnet18", "-d", "l4", "--image-size", "64x96", "--json")[1])
    assert smaller["shape"] == "1 image of 64 x 96"
    assert smaller["captured"] == "now"
    assert smaller["devices"][0]["device_s"] < found["devices"][1]["device_s"]


@pytest.mark.parametrize(
    ("words", "told"),
    [(("resnet18", "--sequence-length", "8"), "--sequence-length: got 8, expected none: resnet-18"),
     (("resnet18", "--image-size", "big"), "--image-size: got 'big', expected pixels: 224"),
     (("bert-tiny", "--image-size", "64"), "expected none: bert-tiny takes no images"),
     (("resnet19",), "did you mean 'resnet-18'"),
     (("net.py", "-d", "t5"), "--devices: got 't5'"),
     (("net.py:Turns",), "control flow that depends on values of tensors cannot be captured"),
     (("net.py:Ends",), "model: got 'SystemExit: that was all"),
     (("net:Net",), "'foreplan predict net.py:Net' prices the module in that file"),
     (("net.py",), "say which: net.py:Net or net.py:Ends or net.py:Turns"),
     (("net.py:Net", "--sequence-length", "8"), "--sequence-length: got 8, expected none: net.py"),
     (("net.py:Net", "--batch", "0"), "--batch: got 0, expected at least 1"),
     (("bert-tiny", "--sequence-length", "-1"), "--sequence-length: got -1, expected at least 1"),
     (("net.py:Net", "--dtype", "int8"), "dtype: got 'int8'")],
)  # fmt: skip
def test_what_does_not_go_together_is_said_in_a_line(
    run: Run, words: tuple[str, ...], told: str
) -> None:
    code, out, err = run(*words, *(() if "-d" in words else ("-d", "t4")))
    assert (code, out) == (2, "")
    assert told in err
    assert [line for line in err.splitlines() if line != "in forward"][1:] == []


def test_a_file_is_priced_on_many_devices(run: Run) -> None:
    code, out, err = run("net.py:Net", "--devices", "all", "--batch", "3", "--json")
    found = json.loads(out)  # and nothing of what the file prints
    assert (code, err) == (0, "in forward\n")
    assert found["shape"] == "inputs (float32[3, 64])"
    assert (found["batch"], found["sequence_length"], found["captured"]) == (None, None, "now")
    assert found["weight_bytes"] == 4 * 65 * 64
    assert len(found["devices"]) + len(found["unpriced"]) > 40
    code, out, _ = run("net.py:Net", "-d", "t4", "--phase", "training", "--dtype", "fp16",
                       "--trace", "t.json", "--json")  # fmt: skip
    assert code == 0
    assert json.loads(out)["devices"][0]["by_part_s"]["backward"] > 0
    assert json.loads(Path("t.json").read_text())["traceEvents"]


def test_python_ranks_devices_for_a_module_as_for_a_name() -> None:
    module, x = torch.nn.Linear(64, 32), torch.zeros(4, 64)
    found = rank_devices(module, "t4,l4", inputs=x, costs="roofline")
    assert repr(found).startswith("<Ranking: Linear, inputs (float32[4, 64]), inference: ")
    one = predict_latency(module, "t4", inputs=(x,), costs="roofline")
    assert {r.device: r.latency_s for r in found.replays}["t4"] == one.latency_s
    with pytest.raises(SpecError, match="rank_devices: batch: got 2, expected none, as a module's"):
        rank_devices(module, "t4", inputs=x, batch=2)
    with pytest.raises(SpecError, match="rank_devices: inputs: got nothing"):
        rank_devices(module, "t4")
    with pytest.raises(SpecError, match=r"image_size: got .* expected none"):
        rank_devices(module, "t4", inputs=x, image_size=(8, 8))


def test_this_host_is_labelled_as_a_forecast(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(name: str, where: str) -> Device:
        return Device(
            name=name, chip="some chip", vendor="some", kind="cpu", notes="Some Processor",
            peak_flops={"fp32/vector": 1e11}, memory_bandwidth=2e10, launch_overhead_s=1e-6,
        )  # fmt: skip

    monkeypatch.setattr("foreplan.cost_models.pass_arguments.host_device", read)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 9.0, 9.0))
    out = " ".join(run("net.py:Net", "-d", "cpu:threads=1,isa=avx2,t4")[1].split())
    assert "cpu:threads=1,isa=avx2: this host (Some Processor), a forecast" in out
    assert "no operator was timed" in out
    assert "this host" not in run("net.py:Net", "-d", "t4")[1]
    load, cores = 1e3, len(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    busy = json.loads(run("net.py:Net", "-d", "cpu,t4", "--json")[1])
    assert busy["here"] == {"cpu": f"Some Processor, busy: load 1000.0 on {cores} cores"}
