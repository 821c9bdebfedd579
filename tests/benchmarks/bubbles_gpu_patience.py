"""`Patience`: ends a decision of `bubbles_on_gpus.py` that makes no progress, and says where it is.

A GPU whose streams wait for each other never answers. So every process notes what it does in
``FOLDER/at.RANK.json``; one that has done the same for too long adds where its host and its device
stand, writes the stacks of its threads to ``FOLDER/stacks.*.txt`` and ends. `note_hang` then enters
the decision as hung into ``results.json``, and the next attempt goes on with the others.

``BUBBLES_HANG="SHAPE|DECISION|RANK"`` rehearses it: that rank's kernels never return.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foreplan.planner.verify.watchdog import Watchdog

#: Seconds that one thing may take. The longest so far, a reference step in one process, took five.
PATIENCE_S = float(os.environ.get("BUBBLES_PATIENCE_S", "30"))
#: How often a decision may hang before it is left alone.
TRIES = 2


class Patience:
    """See the module; one object a process.

    Args:
        rank: of the process.
        folder: where notes go.
    """

    def __init__(self, rank: int, folder: Path) -> None:
        self._rank, self._folder = rank, folder
        self._shape = self._decision = ""

    def begin(self, shape: str, decision: str) -> None:
        """What is run from here on."""
        self._shape, self._decision = shape, decision

    def during(
        self, doing: str, detail: Callable[[], str] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Watch a block.

        Args:
            doing: what the block does.
            detail: what else is known of where it stands.
        """
        self._note(doing)
        return Watchdog(self._give_up).phase(doing, PATIENCE_S, detail)

    def rehearse(self, kernels: Any) -> None:
        """Have kernels hang if that is asked for."""
        asked = os.environ.get("BUBBLES_HANG")
        if asked == f"{self._shape}|{self._decision}|{self._rank}":
            kernels.run = lambda action: time.sleep(1e6)

    def _give_up(self, why: str) -> None:
        self._note("waiting", why=why)
        name = f"stacks.{slug(self._shape)}.{slug(self._decision)}.{os.getpid()}.{self._rank}.txt"
        with (self._folder / name).open("w") as file:
            faulthandler.dump_traceback(file)
        print(f"rank {self._rank}: {self._shape} | {self._decision}: {why}", flush=True)

    def _note(self, doing: str, **more: str) -> None:
        known = {"shape": self._shape, "decision": self._decision, "doing": doing, **more}
        write(self._folder / f"at.{self._rank}.json", known)


def over(row: dict[str, Any]) -> bool:
    """Whether nothing is left to do for a decision: it was measured, or hung too often."""
    return bool(row) and ("hung" not in row or "measured_s" in row or len(row["hung"]) >= TRIES)


def results_of(everything: dict[str, Any], name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Results of a shape by decision, to be filled.

    Args:
        everything: of all shapes.
        name: of the shape.
        found: its plans.
    """
    known = {key: value for key, value in found.items() if key != "decisions"}
    results: dict[str, Any] = everything.setdefault(name, known | {"results": {}})["results"]
    return results


def note_hang(folder: Path) -> str:
    """Enter a decision that hung into the results, with what each rank said last.

    Returns:
        Shape and decision; nothing if none hung.
    """
    notes = {path.stem[3:]: json.loads(path.read_text()) for path in folder.glob("at.*.json")}
    for path in folder.glob("at.*.json"):
        path.unlink()
    stuck = next((note for note in notes.values() if "why" in note), None)
    if stuck is None:
        return ""
    shape, decision = stuck["shape"], stuck["decision"]
    path = folder / "results.json"
    everything = json.loads(path.read_text()) if path.exists() else {}
    found = json.loads((folder / f"plans.{slug(shape)}.json").read_text())
    row = results_of(everything, shape, found).setdefault(decision, {"hung": []})
    row["hung"].append({
        rank: note.get("why", note["doing"]) if note["decision"] == decision else "elsewhere"
        for rank, note in sorted(notes.items())
    })  # fmt: skip
    write(path, everything)
    return f"{shape} | {decision}"


def write(path: Path, document: Any) -> None:
    """Write a file that is whole as soon as it is there."""
    path.with_suffix(".part").write_text(json.dumps(document))
    path.with_suffix(".part").rename(path)


def slug(name: str) -> str:
    """A name as part of a file's."""
    return name.replace(" ", "_").replace(",", "")
