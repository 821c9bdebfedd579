"""FailedSource: what was tried on a device and failed there, which no other source may price.

A kernel that crashed has no time, and a roofline or a predictor that knows nothing of the crash
would make it look fast. Hence a failure is an answer of its own, not a missing one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foreplan.cost_models.costs import Work
from foreplan.cost_models.sources._device_words import find
from foreplan.datasets.operators import ATTENTIONS
from foreplan.datasets.profile import Row
from foreplan.datasets.program import Program
from foreplan.errors import FailedProgramError


class FailedSource:
    """Refuses programs that failed on a device, and prices nothing.

    A failure speaks for its own shape. Other shapes are refused only where no program of the same
    operator and variant ran at all; decode and prefill attention are told apart.

    Args:
        rows: what was tried, by rank label or device name.
    """

    def __init__(self, rows: Mapping[str, Sequence[Row]]) -> None:
        self._rows = dict(rows)
        self._failures: dict[int, _Failures] = {}

    def estimate(self, work: Work, device: str) -> None:
        """Let a program pass.

        Raises:
            FailedProgramError: it failed on ``device``, or all that is like it did.
        """
        rows = find(self._rows, device)
        if rows is None or not isinstance(work, Program):
            return
        if id(rows) not in self._failures:
            self._failures[id(rows)] = _Failures(rows)
        self._failures[id(rows)].refuse(work, device)


class _Failures:
    """Failed rows by program, and of each regime that never ran its first."""

    def __init__(self, rows: Sequence[Row]) -> None:
        tried = [(row.program(), row) for row in rows]
        ran = {regime(item) for item, row in tried if row.status == "ok"}
        failed = [(item, row) for item, row in tried if row.status != "ok"]
        self._exactly = dict(failed)
        self._never: dict[tuple[str, ...], list[tuple[Program, Row]]] = {}
        for item, row in failed:
            if (kind := regime(item)) not in ran:
                self._never.setdefault(kind, []).append((item, row))

    def refuse(self, work: Program, device: str) -> None:
        row = self._exactly.get(work)
        if row is not None:
            what = f"{work} failed on {device} when it was measured"
        elif like := self._never.get(regime(work)):
            first, row = like[0]
            what = f"{work} has no cost on {device}, where nothing like it ran: {first} failed"
        else:
            return
        raise FailedProgramError(
            f"{what} ({row.error or 'no reason on record'})",
            fix="where that is mended, 'foreplan profile' with the same options tries it again",
        )


def regime(item: Program) -> tuple[str, ...]:
    """What programs must share to say something of each other: one kernel path of a variant."""
    decode = item.op in ATTENTIONS and item.dims["queries"] == 1
    return (item.op, str(item.variant), "decode" if decode else "")
