import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from foreplan.datasets.storage import refuse_unwritable, write_atomically
from foreplan.errors import SpecError
from foreplan.planner.plan_command import plan_files


def test_writes_text_and_bytes_and_leaves_nothing_beside(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a.txt", "µs\r\n")
    write_atomically(tmp_path / "b.bin", b"\x00\xff")
    assert (tmp_path / "a.txt").read_bytes() == "µs\r\n".encode()
    assert (tmp_path / "b.bin").read_bytes() == b"\x00\xff"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.bin"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_failed_write_keeps_the_former_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    target = tmp_path / "plan.json"
    target.write_text("former")

    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises((KeyboardInterrupt, SpecError)):
        write_atomically(target, "new")
    assert target.read_text() == "former"
    assert list(tmp_path.iterdir()) == [target]


def test_an_unwritable_path_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="No such file or directory"):
        write_atomically(tmp_path / "no" / "x", "")
    with pytest.raises(SpecError, match="Is a directory"):
        write_atomically(tmp_path, "")


def test_what_cannot_be_written_is_known_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    refuse_unwritable(tmp_path / "file")
    refuse_unwritable(tmp_path / "new")
    refuse_unwritable("/dev/stdout")
    assert not (tmp_path / "new").exists()
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "no" / "plan.json", "No such file"),
                      (tmp_path / "file" / "plan.json", "Not a directory")):  # fmt: skip
        with pytest.raises(SpecError, match=why):
            refuse_unwritable(path)


def test_a_plan_is_refused_before_it_is_made_where_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foreplan.planner.plan_command.plan", lambda *a, **k: pytest.fail("solved"))
    with pytest.raises(SpecError, match="a path that can be written"):
        plan_files("serving", "opt-1.3b", "2xt4", None, costs="roofline", seed=0,
                   output=tmp_path / "none" / "plan.json")  # fmt: skip


def test_standard_output_may_be_a_pipe() -> None:
    code = (
        "from foreplan.datasets.storage import refuse_unwritable, write_atomically as write\n"
        "refuse_unwritable('/dev/stdout'); write('/dev/stdout', 'whole')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "whole"


def test_keeps_permissions_and_follows_links(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to("target")
    write_atomically(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(pipe, "through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
