"""Measuring past this machine: a real local Ray, a real tracker with a server, real crashes."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from foreplan.datasets.timing.child_process import ChildEnded
from foreplan.datasets.tir import toolchain
from foreplan.datasets.tir.build_dataset import build_dataset
from foreplan.datasets.tir.measure import MeasureOptions, measure
from foreplan.datasets.tir.records import ProgramRecord, read_records
from foreplan.datasets.tir.rpc_site import RpcSite, Tracker
from foreplan.datasets.tir.task import Task
from foreplan.errors import MissingDataError, SpecError

try:
    toolchain.require_tvm()
except (MissingDataError, SpecError) as error:
    pytest.skip(f"needs TVM: {error}", allow_module_level=True)

torch = pytest.importorskip("torch")
NAME = "cpu:threads=1,isa=avx2"
OPTIONS = MeasureOptions(samples=2, build_timeout_s=300, time_timeout_s=300)
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: make test installs it"
)


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    from foreplan.datasets.tir.extract import extract_module

    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval()
    return extract_module(model, (torch.zeros(4, 16),), "one-layer")[:1]


def _check(records: list[ProgramRecord], chip: str) -> None:
    assert records
    assert {record.status for record in records} == {"ok"}
    assert {record.chip for record in records} == {chip}
    assert all(0 < r.min_s <= r.median_s <= r.max_s for r in records)


# ---------------------------------------------------------------------------------------- boards


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=10.0).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def board() -> Iterator[Tracker]:
    """A tracker and one server, each in a session of its own that is ended whole."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tvm.exec.rpc_{}", "--host", "127.0.0.1", "--silent"]
    made = []

    def start(what: str, *more: str) -> None:
        words = [word.format(what) for word in command]
        made.append(
            subprocess.Popen(
                [*words, *more], start_new_session=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
        )  # fmt: skip

    try:
        start("tracker", "--port", str(port), "--port-end", str(port + 1))
        start("server", "--tracker", f"127.0.0.1:{port}", "--key", "board")
        tracker = Tracker("127.0.0.1", port, "board")
        toolchain.load_tvm()
        from tvm import rpc  # type: ignore[import-untyped,unused-ignore]

        deadline = time.monotonic() + 300  # both load TVM first
        while not listens(port):  # TVM tries again too, and leaves a socket open each time
            assert time.monotonic() < deadline, "the tracker did not start"
            time.sleep(0.5)
        session = rpc.connect_tracker(tracker.host, port)
        try:
            while not session.summary()["server_info"]:
                assert time.monotonic() < deadline, "the server did not register"
                time.sleep(0.5)
        finally:
            session.close()
        yield tracker
    finally:
        for process in made:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_programs_are_timed_on_a_board(board: Tracker, tasks: list[Task], tmp_path: Path) -> None:
    with RpcSite(board, NAME, chip="a board") as site:
        assert len(site.devices) == 1
        assert json.loads(site.devices[0].target)["mtriple"]  # the board told it
        found = measure(tasks, site, tmp_path, OPTIONS)
        records = list(read_records(tmp_path))
        _check(records, "a board")
        assert all(r.load != r.load for r in records)  # a board does not tell its load
        assert measure(tasks, site, tmp_path, OPTIONS)["rows"] == found["rows"]  # nothing is left


def test_a_session_that_is_lost_is_a_failure_and_the_next_one_works(
    board: Tracker, tasks: list[Task], tmp_path: Path
) -> None:
    with RpcSite(board, NAME, chip="a board") as site:
        builder, timer = site.builder(0), site.timer(0)
        library = str(tmp_path / "programs.so")
        built = builder.ask(
            {
                "do": "build", "module": tasks[0].module, "count": 1, "only": None, "start": 0,
                "known": [], "library": library,
                "device": {f: getattr(site.devices[0], f) for f in site.devices[0].__slots__},
            },
            300,
        )  # fmt: skip
        request = {
            "do": "time", "library": library, "key": built["programs"][0]["key"],
            "arguments": built["arguments"], "kind": "llvm", "slow_s": 1.0,
        }  # fmt: skip
        assert timer.ask(request, 300)["times_s"]
        child = timer._child
        assert child is not None
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(ChildEnded):
            child.receive(30)
        assert timer.ask(request, 300)["times_s"]  # the board was freed and given again
        builder.close()
        timer.close()


def test_boards_that_are_not_there_are_named(board: Tracker, tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="the tracker knows board"):
        RpcSite(board._replace(key="other"), NAME, chip="x").__enter__()
    with pytest.raises(MissingDataError, match="refused"):
        RpcSite(Tracker("127.0.0.1", 1, "board"), NAME, chip="x").__enter__()
    with pytest.raises(SpecError, match="--chip"):
        RpcSite(board, NAME).__enter__()
    with pytest.raises(SpecError, match="cortex"):
        RpcSite(board, NAME, chip="x", target="{}").__enter__()
    for text in ("board", "h:1", "h:x/key"):
        with pytest.raises(SpecError, match="HOST:PORT/KEY"):
            Tracker.parse(text)
    with pytest.raises(SpecError, match="one"):
        build_dataset(tmp_path, ray="local", rpc="h:1/k")
    with pytest.raises(SpecError, match="--rpc"):
        build_dataset(tmp_path, target="{}")


# ------------------------------------------------------------------------------------------- Ray


@needs_ray
def test_programs_are_measured_on_ray(tasks: list[Task], tmp_path: Path) -> None:
    from foreplan.datasets.tir.ray_site import RaySite
    from foreplan.datasets.tir.target import target_device

    chip = target_device(NAME).chip
    with RaySite("local", NAME) as site:
        assert [device.chip for device in site.devices] == [chip]
        measure(tasks, site, tmp_path, OPTIONS)
        records = list(read_records(tmp_path))
        _check(records, chip)
        assert all(r.load >= 0 for r in records)  # the node's own
        # A job whose code ends the process is a failure; the worker answers the next one.
        worker = site.timer(0)
        request = {"do": "time", "library": str(tmp_path / "no.so"), "key": "", "arguments": [],
                   "kind": "llvm", "slow_s": 1.0}  # fmt: skip
        Path(request["library"]).write_bytes(b"not a library")
        assert "error" in worker.ask(request, 300)
        with pytest.raises(ChildEnded, match="no answer"):
            worker.ask({**request, "key": "again"}, 0.0)
        assert "error" in worker.ask(request, 300)
        worker.close()
        # Another round goes on from what is there.
        more = measure(tasks, site, tmp_path, replace(OPTIONS, rounds=2))
        assert more["rows"] > len(records)


def test_a_node_keeps_no_folder_once_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foreplan.datasets.tir.ray_site import _NodeWorker

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    worker = _NodeWorker("timer", "llvm")
    assert not list(tmp_path.iterdir())
    request: dict[str, Any] = {
        "do": "time", "library": "", "key": "", "arguments": [], "kind": "llvm", "slow_s": 1.0,
    }  # fmt: skip
    for _ in range(2):  # the next request starts another child, in another folder
        answer = worker.ask(request, 300, b"not a library")
        assert answer.reply is not None
        assert "error" in answer.reply
        worker.close()  # Ray kills an actor, which then removes nothing
        assert not list(tmp_path.iterdir())


@needs_ray
def test_no_cluster_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from foreplan.datasets.ranks.ray_cluster import connected

    with pytest.raises(MissingDataError, match="refused"), connected("127.0.0.1:1"):
        pass

    def none_runs(**options: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.\nmore")

    # Another test may have a cluster running on this machine, which ``auto`` would find.
    monkeypatch.setattr(ray, "init", none_runs)
    with pytest.raises(MissingDataError, match="at auto: Could not find"), connected("auto"):
        pass
