"""The doctor says what is here, and names what is missing with the command that brings it."""

import io
import json

import pytest
from rich.console import Console

from foreplan.planner import doctor
from foreplan.planner.doctor import TASKS, examine
from foreplan.planner.report.doctor_tables import doctor_tables

GOOD = {
    "realtime": {"allowed": True},
    "speeds": {"alone": 1.02, "together": 1.04},
    "torch": {"version": "2.13.0", "cuda": "13.0", "gloo": True, "nccl": True,
              "instructions": "AVX2"},
    "cpu": {"bf16/bf16/torch.linear": "", "fp32/fp32/torch.linear": "",
            "int8/bf16/torch.int8pack_mm": "RuntimeError: no such instruction"},
    "gpus": [{"name": "Example 9", "sms": 132, "memory_bytes": 1 << 37, "free_bytes": 1 << 36,
              "capability": "9.0", "slices": True, "kernels": {"bf16/bf16/torch.linear": ""}}],
    "tvm": {"tvm": "0.27.0", "ffi": "0.1.14", "targets": ["llvm", "cuda"]},
}  # fmt: skip


@pytest.fixture
def found_with(monkeypatch):
    def diagnose(**changes):
        monkeypatch.setattr(doctor, "_probe", lambda timeout_s: GOOD | changes)
        return examine()

    return diagnose


def check(found, what):
    return next(c for c in found.checks if c.what == what)


def shown(found, width):
    console = Console(file=io.StringIO(), width=width, no_color=True)
    console.print(doctor_tables(found))
    text = console.file.getvalue()
    assert max(len(line) for line in text.splitlines()) <= width
    return text


def test_this_machine():
    """Kernels, gloo and TVM really run here, in the process of its own."""
    found = examine()
    assert all(found.ready.values()), found.checks
    (cpu,) = (d for d in found.devices if d.name == "cpu")
    assert {"bf16/bf16", "fp32/fp32", "int8/bf16"} <= set(cpu.dtypes)
    assert cpu.failing == {}
    assert json.loads(json.dumps(found.document(), allow_nan=False))["ready"]["plan"] is True
    assert "gloo" in check(found, "communication").found


def test_cores_that_others_share_are_told(found_with):
    assert check(found_with(), "steadiness").state == "ok"
    shared = check(found_with(speeds={"alone": 1.5, "together": 2.137}), "steadiness")
    assert (shared.state, shared.stops) == ("note", ())
    assert "1.50 times its best, with all at work 2.14" in shared.found
    assert "taskset" in shared.fix
    unknown = check(found_with(speeds={"error": "OSError: no such core"}), "steadiness")
    assert (unknown.state, unknown.found) == ("note", "OSError: no such core")


def test_devices_and_their_slices(found_with):
    cpu, gpu = found_with().devices
    assert cpu.dtypes == ("bf16/bf16", "fp32/fp32")
    assert list(cpu.failing) == ["int8/bf16/torch.int8pack_mm"]
    assert (gpu.name, gpu.slices) == ("cuda:0", ("cuda:0/sms=32",))


@pytest.mark.parametrize(
    ("changes", "what", "stops", "fix"),
    [
        ({"torch": {"error": "ImportError: libfoo"}}, "torch", {"profile", "verify"}, "pip"),
        ({"tvm": {"error": "apache-tvm is not installed; pip install \"apache-tvm>=0.27\""}},
         "TVM", {"dataset build"}, "pip install \"apache-tvm>=0.27\""),
        ({"tvm": {"tvm": "0.27", "ffi": "0.1.14", "targets": []}}, "TVM", {"dataset build"}, "pip"),
        ({"torch": GOOD["torch"] | {"gloo": False}}, "communication", {"verify"}, "pip"),
    ],
)  # fmt: skip
def test_what_is_missing_stops_tasks_and_has_a_command(found_with, changes, what, stops, fix):
    found = found_with(**changes)
    seen = check(found, what)
    assert seen.state == "missing"
    assert fix in seen.fix
    assert stops <= {task for task, can in found.ready.items() if not can}
    assert found.ready["plan"]
    for width in (60, 80, 120):
        assert "cannot" in shown(found, width)


def test_restrictions_stop_nothing(found_with, monkeypatch):
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (7.0, 7.0, 7.0))
    monkeypatch.setattr(doctor, "_governor", lambda: "powersave")
    found = found_with(realtime={"allowed": False, "reason": "x"}, gpus=[])
    assert all(found.ready.values())
    for what in ("load", "clock", "real-time priority"):
        assert check(found, what).state == "note"
        assert check(found, what).fix


def test_a_probe_that_dies_is_told(monkeypatch):
    """A kernel may end its process; what was found before stays."""
    monkeypatch.setattr(doctor, "PROBE", "foreplan.no_such_module")
    found = examine()
    assert "ended with code" in check(found, "torch").found
    assert [task for task in TASKS if found.ready[task]] == ["plan"]
