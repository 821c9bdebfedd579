"""Extraction, sampling and measuring with TVM, on programs of microseconds."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest
from torch import nn

from foreplan.datasets.tir import toolchain
from foreplan.datasets.tir.measure import MeasureOptions, measure
from foreplan.datasets.tir.records import read_records
from foreplan.datasets.tir.site import LocalSite
from foreplan.datasets.tir.target import TargetDevice, target_device
from foreplan.datasets.tir.task import Task
from foreplan.datasets.tir.worker_process import ChildEnded, WorkerProcess
from foreplan.errors import MissingDataError, SpecError

try:
    toolchain.require_tvm()
except (MissingDataError, SpecError) as error:
    pytest.skip(f"needs TVM: {error}", allow_module_level=True)

torch = pytest.importorskip("torch")
CUDA = TargetDevice(
    "cuda:0", "cuda", 0, "h200",
    {"kind": "cuda", "arch": "sm_90", "max_threads_per_block": 1024,
     "max_shared_memory_per_block": 49152, "thread_warp_size": 32},
)  # fmt: skip


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))))


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    from foreplan.datasets.tir.extract import extract_module

    return extract_module(_Model().eval(), (torch.zeros(8, 32),), "two-layers")


def test_equal_layers_are_one_task(tasks: list[Task]) -> None:
    calls = {task.name: dict(task.calls) for task in tasks}
    assert {"two-layers": 2} in calls.values()
    assert len({task.key for task in tasks}) == len(tasks)


def test_the_key_ignores_names(tasks: list[Task]) -> None:
    tvm = toolchain.load_tvm()
    import tvm_ffi

    for task in tasks:
        renamed = json.loads(task.module)
        for node in renamed["nodes"]:
            if node["type"] == "ffi.String" and node["data"].startswith(("v_", "ax", "T_", "lv")):
                node["data"] += "_renamed"
        module = tvm.ir.load_json(json.dumps(renamed))
        assert f"{tvm_ffi.structural_hash(module):016x}" == task.key


def test_gradients_are_those_of_autograd() -> None:
    from foreplan.datasets.tir.backward import gradient
    from foreplan.datasets.tir.extract import extract_module

    class Convolutions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Conv2d(4, 6, 3, 2, 1)
            self.depthwise = nn.Conv2d(6, 6, 3, 1, 1, groups=6)
            self.grouped = nn.Conv2d(6, 8, 3, padding=2, dilation=2, groups=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.grouped(torch.relu(self.depthwise(torch.relu(self.dense(x)))))

    torch.manual_seed(0)
    module, x = Convolutions(), torch.randn(2, 4, 11, 9)
    step, inputs = gradient(module, (x,))
    module(x).square().mean().backward()
    for found, parameter in zip(step(*inputs), module.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad)
    assert len(extract_module(step, inputs, "convolutions")) > 10


def test_blocks_that_repeat_are_captured_once() -> None:
    from dataclasses import replace

    from foreplan.datasets.tir.extract import extract
    from foreplan.datasets.tir.networks import network

    shape = {"batch": 1, "tokens": 8}
    deep = replace(network("bert-tiny"), layers=4)
    grown = {task.key: sum(task.calls.values()) for task in extract(deep, shape)}
    # A network that says it has two layers, and builds four.
    whole = replace(deep, layers=2, build=lambda shape, _: deep.build(shape, 4))
    assert grown == {task.key: sum(task.calls.values()) for task in extract(whole, shape)}


def test_a_model_that_does_not_export_says_so() -> None:
    from foreplan.datasets.tir.extract import extract_module

    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(SpecError, match=r"network odd: .*torch\.export captures"):
        extract_module(Branches(), (torch.zeros(2),), "odd")


@pytest.mark.parametrize("device", [target_device("cpu:threads=1,isa=avx2", chip="test"), CUDA])
def test_samples_are_reproducible(tasks: list[Task], device: TargetDevice) -> None:
    import tvm_ffi

    from foreplan.datasets.tir.sample import Sampler, rebuild

    tvm = toolchain.load_tvm()
    task = max(tasks, key=lambda task: len(task.module))
    first = list(Sampler(task.module, device).samples(3))
    again = list(Sampler(task.module, device).samples(3))
    assert [s.module for s in first] == [s.module for s in again]
    assert len({s.module for s in first}) == 3
    rebuilt = rebuild(task.module, first[1].trace)
    assert tvm_ffi.structural_equal(rebuilt, tvm.ir.load_json(first[1].module))


def test_programs_are_measured_and_a_second_run_adds_nothing(
    tasks: list[Task], tmp_path: Path
) -> None:
    device = target_device("cpu:threads=1,isa=avx2", chip="test")
    options = MeasureOptions(samples=2, build_timeout_s=300, time_timeout_s=300)
    first = measure(tasks[:1], LocalSite([device]), tmp_path, options)
    records = list(read_records(tmp_path))
    assert first["rows"] == len(records) > 0
    assert {record.status for record in records} == {"ok"}
    assert all(0 < r.min_s <= r.median_s <= r.max_s for r in records)
    assert measure(tasks[:1], LocalSite([device]), tmp_path, options)["rows"] == first["rows"]


def test_an_interrupt_ends_every_thread_and_keeps_what_was_finished(
    tasks: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foreplan.datasets.tir.measure._TELL_EVERY_S", 0.2)

    def interrupted(line: str) -> None:
        if line.endswith(" ok") and int(line.split()[1]) > 1:
            raise KeyboardInterrupt

    device = target_device("cpu:threads=1,isa=avx2", chip="test")
    options = MeasureOptions(samples=1, rounds=500, build_timeout_s=300, time_timeout_s=300)
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        measure(tasks[:1], LocalSite([device]), tmp_path, options, progress=interrupted)
    assert threading.active_count() == before
    finished = (tmp_path / "shards" / "jobs.txt").read_text().splitlines()
    assert 0 < len(finished) < 500


def test_a_child_that_dies_is_replaced() -> None:
    with WorkerProcess() as worker:
        assert "error" in worker.ask({"do": "nothing"}, 30)  # a bad request is answered
        child = worker._child
        assert child is not None
        os.kill(child.pid, signal.SIGSEGV)
        child._process.wait()
        assert "error" in worker.ask({"do": "nothing"}, 30)
        with pytest.raises(ChildEnded, match="no answer"):
            worker.ask({"do": "nothing"}, 0.0)
        assert "error" in worker.ask({"do": "nothing"}, 30)


@pytest.mark.parametrize("name", ["cpu", "cpu:threads=1,isa=avx2", "cpu:threads=1,isa=avx512_bf16"])
def test_cpu_devices(name: str) -> None:
    found = target_device(name, chip="c")
    assert found.kind == "llvm"
    assert found.name.startswith("cpu:threads=1,isa=")


@pytest.mark.parametrize("name", ["cpu:threads=4", "cpu:isa=neon", "t4", "cpu:a=b"])
def test_other_devices_are_refused(name: str) -> None:
    with pytest.raises(SpecError):
        target_device(name)


def test_versions_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.15.post2"}
    monkeypatch.setattr(toolchain.importlib.metadata, "version", versions.__getitem__)
    with pytest.raises(SpecError, match=r"apache-tvm-ffi: got '0\.1\.15\.post2'.*pip install"):
        toolchain.require_tvm()
    versions["apache-tvm"] = "0.19.0"
    with pytest.raises(SpecError, match="apache-tvm: got"):
        toolchain.require_tvm()
