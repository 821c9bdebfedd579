"""ProfileJournal: what a running profile has measured so far, safe against a kill at any moment.

One JSON line a measurement, flushed to the disk before the next begins. The first line binds the
file to a device and its software: measurements of another kind never mix. A torn last line (the
process died while writing it) is cut off. The file is locked while it is open.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from foreplan.datasets._document_text import Words
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.timing.measurement import Measurement
from foreplan.errors import ForeplanError, SpecError

SCHEMA = "foreplan.profile-journal/1"
#: What to do about a file that holds something else.
REPLACE = "measure into another folder (-o), or add --replace (replace=True)"


class ProfileJournal:
    """Append-only record of measurements. Use as a context manager, which holds the lock.

    Args:
        path: the file; made if missing.

    Raises:
        SpecError: on entering: the path cannot be written, or another process measures into it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.parts: dict[tuple[Program, int], Measurement] = {}
        """Measurements by program and round."""
        self.takes: list[dict[str, float]] = []
        """The device's own figures, each time they were measured."""
        self._descriptor = -1
        self._resumed = False

    def __enter__(self) -> Self:
        while True:
            try:
                self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            except OSError as error:
                raise SpecError(
                    str(self.path), got=error.strerror, expected="a path that can be written"
                ) from error
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                self._close()
                raise SpecError(
                    str(self.path), got="a journal that another process writes",
                    expected="one profile at a time into one file",
                ) from error  # fmt: skip
            # The holder before may have removed the file between our opening and locking it.
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(self._descriptor).st_ino == self.path.stat().st_ino:
                    return self
            self._close()

    def __exit__(self, *raised: object) -> None:
        # A device that could not be opened leaves no trace.
        with contextlib.suppress(OSError):
            nothing = self._resumed and not self.parts and not self.takes
            if nothing or not os.fstat(self._descriptor).st_size:
                self.path.unlink(missing_ok=True)
        self._close()

    def resume(self, identity: Mapping[str, Any], *, replace: bool = False) -> str | None:
        """Read what is there, or begin anew; call once, before `add`.

        Args:
            identity: device and software that the measurements belong to, JSON data.
            replace: drop what another machine has measured.

        Returns:
            Why an earlier journal was dropped, ``None`` if none was.

        Raises:
            SpecError: another machine's, which is not to be dropped.
        """
        lines, whole = self._read()
        before = lines[0].get("identity") if lines else None
        chip = before.get("chip") if isinstance(before, dict) else None
        if not replace and chip is not None and chip != identity.get("chip"):
            raise another_machine(str(self.path), chip, identity.get("chip"))
        self._resumed = True
        dropped: str | None = None
        if lines:
            header = lines[0]
            if header.get("schema") == SCHEMA and header.get("identity") == identity:
                self._cut(whole)
                for line in lines[1:]:
                    self._take(line)
                return None
            dropped = f"{self.path.name}: begun anew, because {_difference(header, identity)}"
        self._cut(0)
        self._append({"schema": SCHEMA, "identity": identity})
        return dropped

    def add(self, measured: Program, turn: int, result: Measurement) -> None:
        """Record a measurement; it is on the disk when this returns."""
        self.parts[measured, turn] = result
        self._append(
            {
                "op": measured.op,
                "dims": measured.dims,
                "variant": str(measured.variant),
                "round": turn,
                "result": asdict(result),
            }
        )

    def add_figures(self, figures: Mapping[str, float]) -> None:
        """Record the device's figures, measured once more."""
        self.takes.append(dict(figures))
        self._append({"figures": self.takes[-1]})

    @property
    def figures(self) -> dict[str, float]:
        """The median of what was measured, by name; empty before the first time."""
        names = dict.fromkeys(name for take in self.takes for name in take)
        return {
            name: statistics.median(take[name] for take in self.takes if name in take)
            for name in names
        }

    def remove(self) -> None:
        """Delete the file, once its content stands elsewhere; one that stays does no harm."""
        with contextlib.suppress(OSError):
            self.path.unlink()

    # -------------------------------------------------------------------------------- the file

    def _read(self) -> tuple[list[dict[str, Any]], int]:
        """Whole lines, and how many bytes they take; stops at the first that is not JSON."""
        data = self.path.read_bytes()
        lines: list[dict[str, Any]] = []
        whole = 0
        for raw in data.splitlines(keepends=True):
            try:
                line = json.loads(raw)
            except (ValueError, RecursionError):
                break
            if not raw.endswith(b"\n") or not isinstance(line, dict):
                break
            lines.append(line)
            whole += len(raw)
        return lines, whole

    def _take(self, line: dict[str, Any]) -> None:
        # A line of an unknown shape is measured again rather than trusted.
        with contextlib.suppress(
            KeyError, TypeError, ValueError, AttributeError, OverflowError, ForeplanError
        ):
            if "figures" in line:
                take = {name: float(value) for name, value in line["figures"].items()}
                self.takes.append(take)
                return
            measured = program(line["op"], Variant.parse(line["variant"]), **line["dims"])
            result = line["result"]
            times = tuple(float(t) for t in result["times_s"])
            if all(0 < t < math.inf for t in times) and (times or result["error"]):
                part = Measurement(**{**result, "times_s": times})
                self.parts[measured, int(line["round"])] = part

    def _append(self, line: Mapping[str, Any]) -> None:
        data = json.dumps(line).encode() + b"\n"
        with self._writing():
            while data:
                data = data[os.write(self._descriptor, data) :]
            os.fsync(self._descriptor)

    def _cut(self, length: int) -> None:
        with self._writing():
            os.ftruncate(self._descriptor, length)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SpecError(
                str(self.path), got=error.strerror, expected="a disk with room for the journal"
            ) from error

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)  # gives the lock back too
            self._descriptor = -1


def another_machine(path: str, chip: object, here: object) -> SpecError:
    """The error of a file that another machine has measured into.

    Args:
        path: the file.
        chip: whose measurements it holds.
        here: the chip of this machine.
    """
    return SpecError(
        path, got=Words(f"measurements of another machine ({chip})"),
        expected=f"none, or those of this one ({here})", fix=REPLACE,
    )  # fmt: skip


def _difference(header: Mapping[str, Any], identity: Mapping[str, Any]) -> str:
    before = header.get("identity")
    if header.get("schema") != SCHEMA or not isinstance(before, dict):
        return "it was written by another version of Foreplan"
    for key in sorted(set(before) | set(identity)):
        old, new = before.get(key), identity.get(key)
        if old != new:
            if isinstance(old, dict) and isinstance(new, dict):
                key, old, new = next(
                    (k, old.get(k), new.get(k))
                    for k in sorted(set(old) | set(new))
                    if old.get(k) != new.get(k)
                )
            return f"{key} was {old!r} and is {new!r}"
    return "its content is not readable"
