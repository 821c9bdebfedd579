"""A decision of `bubbles_on_gpus.py` that hangs ends, is named, and is tried once more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
#: Far beyond what a busy machine needs.
LIMIT_S = 60.0

RANK = """
import sys
import threading
from pathlib import Path
from bubbles_gpu_patience import Patience
patience = Patience(int(sys.argv[2]), Path(sys.argv[1]))
patience.begin("a shape, small", "roofline")
with patience.during("connecting"):
    pass
with patience.during("step 1", lambda: "the host at step 3"):
    threading.Event().wait()
"""


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(HERE))
    import bubbles_gpu_patience

    return bubbles_gpu_patience


def hang(folder: Path, ranks: int = 2) -> None:
    """Ranks that wait for ever."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    environment["BUBBLES_PATIENCE_S"] = "0.2"
    for rank in range(ranks):
        command = [sys.executable, "-c", RANK, str(folder), str(rank)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode == 1, done.stderr
        assert f"rank {rank}: a shape, small | roofline: step 1 took more than" in done.stdout


def test_what_each_rank_waited_for_is_kept_and_tried_again_once(
    tmp_path: Path, patience: Any
) -> None:
    (tmp_path / "plans.a_shape_small.json").write_text('{"ahead_s": 1.0, "decisions": {}}')
    for times in (1, 2):
        hang(tmp_path)
        (tmp_path / "at.2.json").write_text(
            '{"shape": "a shape, small", "decision": "roofline", "doing": "loading"}'
        )
        assert patience.note_hang(tmp_path) == "a shape, small | roofline"
        found = json.loads((tmp_path / "results.json").read_text())["a shape, small"]
        assert found["ahead_s"] == 1.0
        row = found["results"]["roofline"]
        assert len(row["hung"]) == times
        assert patience.over(row) == (times == 2)
        said = row["hung"][-1]
        assert said["0"].endswith("; the host at step 3")
        assert said["2"] == "loading"
    stacks = sorted(tmp_path.glob("stacks.a_shape_small.roofline.*.0.txt"))
    assert len(stacks) == 2
    assert 'File "<string>", line 11 in <module>' in stacks[0].read_text()


def test_nothing_is_entered_where_nothing_hung(tmp_path: Path, patience: Any) -> None:
    (tmp_path / "at.0.json").write_text('{"shape": "s", "decision": "d", "doing": "loading"}')
    assert patience.note_hang(tmp_path) == ""
    assert not list(tmp_path.iterdir())


def test_what_was_measured_after_all_is_over(patience: Any) -> None:
    assert not patience.over({})
    assert patience.over({"as": "measured"})
    assert not patience.over({"hung": [{}]})
    assert patience.over({"hung": [{}], "measured_s": 1.0})
