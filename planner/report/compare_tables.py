"""Tables of what differs between two documents, for the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from foreplan.planner.compare import Comparison, Difference
from foreplan.planner.report._grid import Column, Grid, bullets, heading
from foreplan.planner.report.text import UNKNOWN, compact, figure, percent, plain

#: Lines of a section that are shown; ``--json`` has all.
_MOST = 24
#: Characters of a text beyond which it stands below its table.
_LONG = 40


def compare_tables(found: Comparison) -> RenderableType:
    """Sections of differences, or that there is none."""
    title = f"{found.of} {plain(found.a)} and {plain(found.b)}"
    if found.same:
        return Text(f"{title}: no difference")
    parts: list[RenderableType] = [Text(title, style="bold")]
    for name, differences in found.sections.items():
        # What is most off stands first; words come after numbers.
        sentences = [_sentence(d) for d in differences if _is_sentence(d)]
        values = [d for d in differences if not _is_sentence(d)]
        ranked = sorted(values, key=lambda d: -abs(d.change or 0.0))[:_MOST]
        hidden = len(values) - len(ranked)
        parts.append(
            Grid(
                name.capitalize(),
                [
                    Column("what", [_name(d) for d in ranked]),
                    Column("first", [_shown(d, d.a) for d in ranked]),
                    Column("second", [_shown(d, d.b) for d in ranked]),
                    Column("change", [_change(d) for d in ranked], True),
                ],
                note=f"and {hidden} more (--json shows all)" if hidden > 0 else "",
            )
            if ranked
            else heading(name.capitalize())
        )
        parts += bullets(sentences)
    return Group(*parts)


def _is_sentence(difference: Difference) -> bool:
    """Whether it is a long text of one side, which a column of a table would cut up."""
    text = difference.a if difference.b is None else difference.b
    alone = difference.a is None or difference.b is None
    return alone and isinstance(text, str) and len(text) > _LONG


def _sentence(difference: Difference) -> str:
    side, text = ("second", difference.b) if difference.a is None else ("first", difference.a)
    return f"{plain(difference.what)} of the {side} alone: {plain(text)}"


def _name(difference: Difference) -> str:
    what = difference.what
    if "@" in what:  # a kernel's name stays as it is
        return plain(what)
    device, colon, rest = what.rpartition(": ")
    return plain(device) + colon + figure(rest, 0)[0] if "/" in device else figure(what, 0)[0]


def _shown(difference: Difference, value: Any) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, int | float) and not isinstance(value, bool):
        return figure(difference.what, value)[1]
    return compact(value)


def _change(difference: Difference) -> str:
    if difference.change is None:
        return UNKNOWN
    if abs(difference.change) < 5e-4:
        return f"{100 * difference.change:+.1g} %"
    return percent(difference.change, signed=True)
