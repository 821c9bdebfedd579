"""The program of a rank: what it says of its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreplan.planner.verify.worker import main


@pytest.mark.parametrize("by_torchrun", [True, False])
def test_under_torchrun_the_exit_code_that_it_hides_is_told(
    by_torchrun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if by_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert main([str(tmp_path / "none.json")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("error: ")
    assert ["exit code 2, in whose place torchrun's own is 1"][: len(said) - 1] == said[1:]
    assert len(said) == 1 + by_torchrun
