"""Devices that are measured at the same time; what is measured is given."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from foreplan.datasets.device import Device
from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.profile import HostTimes, Profile, Row
from foreplan.datasets.timing.profiling import Progress
from foreplan.errors import MissingDataError, SpecError
from foreplan.planner import profile_command
from foreplan.planner import profile_devices as module
from foreplan.planner.profile_devices import profile_devices, profile_hosts

HOST = HostTimes(call_s={}, update_s=(1e-6, 1e-6), factor={}, line_s={})


class Host:
    """Stands in for what measures; ``meet`` of them have to be at work together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, meet: int = 1, cores: int = 16) -> None:
        self.at_work: list[set[str]] = []
        self.hosts: list[str] = []
        self.fails: dict[str, Exception] = {}
        self._now: set[str] = set()
        self._lock, self._met = threading.Lock(), threading.Barrier(meet, timeout=20.0)
        monkeypatch.setattr(module, "measure_profile", self._measure)
        monkeypatch.setattr(module, "measure_host", self._measure_host)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))

    def _measure(self, device: DeviceName, programs: Any, path: Path, **how: Any) -> Profile:
        with self._lock:
            self._now.add(str(device))
            self.at_work.append(set(self._now))
        self._met.wait()
        with self._lock:
            self._now.discard(str(device))
        if str(device) in self.fails:
            raise self.fails[str(device)]
        for done in range(50):
            how["on_progress"](Progress(done, 50))
        row = Row(op="norm", dims={"rows": 2, "cols": 2}, variant="bf16/bf16/torch.rms_norm",
                  status="failed", error="RuntimeError: no")  # fmt: skip
        chip = Device(name=str(device), chip="gh100", vendor="v", kind="cuda")
        made = Profile(device=chip, software={"torch": "2.13"}, rows=(row,))
        made.save(path)
        return made

    def _measure_host(self, device: DeviceName) -> HostTimes:
        if f"host of {device}" in self.fails:
            raise self.fails[f"host of {device}"]
        self.hosts.append(str(device))
        return HOST


def paths_of(names: Sequence[str], folder: Path) -> dict[DeviceName, Path]:
    return {DeviceName.parse(name): folder / f"{k}.json" for k, name in enumerate(names)}


def profiled(names: Sequence[str], folder: Path) -> str:
    paths, told = paths_of(names, folder), io.StringIO()
    profile_devices(
        dict.fromkeys(paths, ()), paths, quick=True, console=Console(file=told, width=200)
    )
    return told.getvalue()


def add_hosts(names: Sequence[str], folder: Path) -> str:
    told = io.StringIO()
    profile_hosts(paths_of(names, folder), console=Console(file=told, width=200))
    return told.getvalue()


def test_whole_gpus_are_measured_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    host = Host(monkeypatch, meet=3)
    told = profiled(["cuda:0", "cuda:1", "cuda:2"], tmp_path)
    assert {"cuda:0", "cuda:1", "cuda:2"} in host.at_work
    assert "cuda:1: 1 programs, 1 failed, the first, norm" in told
    assert "by RuntimeError: no" in told


def test_gpus_of_one_kind_have_the_same_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host = Host(monkeypatch)
    names = ["cuda:0", "cuda:1", "cpu:threads=1"]
    profiled(names, tmp_path)
    assert host.hosts == []
    for _ in range(2):
        add_hosts(names, tmp_path)
        assert host.hosts == ["cuda:0"]
    found = [Profile.load(tmp_path / f"{k}.json").host for k in range(3)]
    assert found == [HOST, HOST, None]


def test_a_host_that_cannot_be_measured_is_told_and_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host = Host(monkeypatch)
    host.fails = {"host of cuda:0": MissingDataError("cuda:0: no prices of its host")}
    profiled(["cuda:0"], tmp_path)
    assert add_hosts(["cuda:0"], tmp_path).splitlines() == [
        "cuda:0: what calls take its host", "cuda:0: no prices of its host",
    ]  # fmt: skip
    assert Profile.load(tmp_path / "0.json").host is None


@pytest.mark.parametrize(
    ("names", "cores"),
    [
        (["cpu:threads=1", "cpu:threads=1,isa=avx2"], 16),
        (["cuda:0/sms=32", "cuda:1"], 16),
        (["cuda:0", "cuda:1"], 3),
    ],
)
def test_what_shares_something_is_measured_alone(
    names: list[str], cores: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host = Host(monkeypatch, cores=cores)
    profiled(names, tmp_path)
    assert host.at_work == [{name} for name in names]


@pytest.mark.parametrize("failing", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize("error", [MissingDataError("no such GPU"), KeyboardInterrupt()])
def test_one_that_fails_ends_the_others_behind_their_current_program(
    error: Exception, failing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host = Host(monkeypatch, meet=2)
    host.fails = {failing: error}
    with pytest.raises(type(error)):
        profiled(["cuda:0", "cuda:1"], tmp_path)
    assert not (tmp_path / f"{failing[-1]}.json").exists()


@pytest.mark.parametrize("host", ["my box", "all", "", "-x", "cpu:threads=1", "h" * 254])
def test_a_host_is_named_well_before_anything_is_measured(
    host: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(profile_command, "profile_devices", unreached)
    monkeypatch.setattr(profile_command, "serve_link", unreached)
    quiet = Console(quiet=True)
    with pytest.raises(SpecError, match=r"^--host: got .*, expected a host's name"):
        profile_command.profile_host(["cpu:threads=1"], tmp_path / "p", host=host, console=quiet)
    for names in ((host, "b"), ("b", host)):
        with pytest.raises(SpecError, match=r"^--(host|peer): got .*, expected a host's name"):
            profile_command.profile_link(
                tmp_path / "p", host=names[0], peer=names[1], serve="0.0.0.0:7", link=None,
                console=quiet,
            )  # fmt: skip
    assert not (tmp_path / "p").exists()


def test_a_cap_is_at_most_the_hosts_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(profile_command, "profile_devices", unreached)
    with pytest.raises(SpecError, match=r"--memory: got '9PiB', expected at most the .*GiB of"):
        profile_command.profile_host(
            ["cpu:threads=1"], tmp_path / "p", memory=["9PiB"], console=Console(quiet=True)
        )
    assert not (tmp_path / "p").exists()


def test_a_link_is_of_two_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(profile_command, "serve_link", unreached)
    with pytest.raises(SpecError, match="another host's name than --host"):
        profile_command.profile_link(
            tmp_path, host="a", peer="a", serve="0.0.0.0:7", link=None, console=Console(quiet=True)
        )


@pytest.mark.parametrize(
    ("sides", "expected"),
    [
        (("10.0.0.1:7", None), "waiting at 10.0.0.1:7 for b's --link, at most 600 s"),
        ((None, "10.0.0.1:7"), "waiting for b's --serve at 10.0.0.1:7, at most 60 s"),
    ],
)
def test_who_waits_for_another_host_says_for_what_and_how_long(
    sides: tuple[str | None, str | None], expected: str, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    told = io.StringIO()

    def nobody(*_: Any) -> None:
        assert expected in told.getvalue(), "told before it waits"
        raise MissingDataError("nobody came")

    for name in ("serve_link", "connect_link"):
        monkeypatch.setattr(profile_command, name, nobody)
    serve, link = sides
    with pytest.raises(MissingDataError):
        profile_command.profile_link(
            tmp_path, host="a", peer="b", serve=serve, link=link,
            console=Console(file=told, width=200),
        )  # fmt: skip


def unreached(*_: Any, **__: Any) -> None:
    raise AssertionError("measured")


def test_a_cluster_that_cannot_be_read_is_not_measured_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(profile_command, "profile_devices", unreached)
    (tmp_path / "cluster.yaml").write_text("devices: []\nnotes: mine\n")
    with pytest.raises(SpecError, match=r"cluster\.yaml"):
        profile_command.profile_host(["cpu:threads=1"], tmp_path, console=Console(quiet=True))
    assert "mine" in (tmp_path / "cluster.yaml").read_text()
