"""Kept documents stay within limits: what was not used for longest is deleted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from foreplan.datasets import kept_documents
from foreplan.datasets.kept_documents import KeptDocument


def _read(document: KeptDocument) -> object:
    return document.read(lambda found: found)


def _aged(folder: Path, count: int) -> list[KeptDocument]:
    """Documents of which each was used a second after the one before, long ago."""
    made = [KeptDocument("test/1", n, folder=folder) for n in range(count)]
    for n, document in enumerate(made):
        document.keep({"n": n})
        os.utime(document.path, (1_000_000 + n, 1_000_000 + n))
    return made


def test_the_oldest_by_use_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _aged(tmp_path, 4)
    own = tmp_path / "notes.json"
    own.write_text("{}")
    os.utime(own, (1, 1))
    assert _read(made[0]) == {"n": 0}  # used now, so that the second is the oldest
    monkeypatch.setattr(kept_documents, "MOST_FILES", 3)
    last = KeptDocument("test/1", "last", folder=tmp_path)
    last.keep({"n": 4})
    assert [_read(each) is not None for each in (*made, last)] == [True, False, False, True, True]
    assert own.exists()


def test_a_folder_has_a_limit_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _aged(tmp_path, 5)
    size = made[0].path.stat().st_size
    monkeypatch.setattr(kept_documents, "MOST_BYTES", 3 * size)
    made[4].keep({"n": 4})
    assert [each.path.exists() for each in made] == [False, False, True, True, True]


def test_what_another_process_deletes_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _aged(tmp_path, 3)
    monkeypatch.setattr(kept_documents, "MOST_FILES", 1)
    unlink = Path.unlink

    def gone(path: Path, missing_ok: bool = False) -> None:
        unlink(path)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", gone)
    made[2].keep({"n": 2})
    assert [each.path.exists() for each in made] == [False, False, True]
