"""Memory that this process may still take."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil
import pytest
import torch

from foreplan.datasets.timing import host_memory
from foreplan.datasets.timing.host_memory import within_free_memory
from foreplan.errors import InfeasibleError

MIB = 1 << 20


def _write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Control groups as files; returns the mount."""
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host_memory, "_MOUNT", tmp_path / "mount")
    return tmp_path / "mount"


def test_the_least_limit_of_the_groups_counts(groups: Path, tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/user/job\n")
    _write(groups / "user", memory__max=f"{300 * MIB}", memory__current=f"{100 * MIB}")
    _write(
        groups / "user/job", memory__max=f"{400 * MIB}", memory__current=f"{50 * MIB}",
        memory__stat=f"anon 1\ninactive_file {20 * MIB}\n",
    )  # fmt: skip
    assert host_memory.total_bytes() == 300 * MIB
    assert host_memory.free_bytes() == 200 * MIB  # 400 - (50 - 20) of the inner one is more


def test_a_container_that_sees_its_group_as_the_root(groups: Path, tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/docker/0123\n")
    _write(groups, memory__max=f"{100 * MIB}\n", memory__current=f"{90 * MIB}\n")
    assert host_memory.free_bytes() == 10 * MIB


def test_groups_of_the_first_version(groups: Path, tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("9:name=systemd:/\n4:cpuacct,memory:/job\n")
    _write(
        groups / "memory/job", memory__limit_in_bytes=f"{64 * MIB}",
        memory__usage_in_bytes=f"{60 * MIB}", memory__stat=f"total_inactive_file {8 * MIB}\n",
    )  # fmt: skip
    _write(groups / "memory", memory__limit_in_bytes="9223372036854771712")
    assert host_memory.total_bytes() == 64 * MIB
    assert host_memory.free_bytes() == 12 * MIB


@pytest.mark.parametrize("text", ["0::/\n", "", "garbled\n", "0::/../../etc\n"])
def test_without_a_limit_the_host_s_memory_counts(groups: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "cgroup").write_text(text)
    _write(groups, memory__max="max\n", memory__current="5\n")
    assert host_memory.total_bytes() == psutil.virtual_memory().total
    assert 0 < host_memory.free_bytes() <= psutil.virtual_memory().total


def test_more_than_is_free_fails_in_one_line_and_the_cap_is_lifted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    monkeypatch.setattr(host_memory, "free_bytes", lambda: 512 * MIB)
    with (
        pytest.raises(InfeasibleError, match=r"the sum needs more memory than the 0.5 GiB .* less"),
        within_free_memory("the sum", "ask for less"),
    ):
        torch.ones(1 << 30)  # 4 GiB
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert float(torch.ones(1 << 20).sum()) == 1 << 20


def test_other_errors_pass_through() -> None:
    with (
        pytest.raises(RuntimeError, match="multiplied"),
        within_free_memory("it", "less"),
    ):
        torch.ones(2, 3) @ torch.ones(2, 3)
