"""Tables of what differs between two documents, for the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from foreplan.planner.compare import Comparison, Difference
from foreplan.planner.report._grid import Column, Grid
from foreplan.planner.report.text import UNKNOWN, compact, figure, percent, plain

#: Lines of a section that are shown; ``--json`` has all.
_MOST = 24


def compare_tables(found: Comparison) -> RenderableType:
    """Sections of differences, or that there is none."""
    title = f"{found.of} {plain(found.a)} and {plain(found.b)}"
    if found.same:
        return Text(f"{title}: no difference")
    parts: list[RenderableType] = [Text(title, style="bold")]
    for name, differences in found.sections.items():
        # What is most off stands first; words come after numbers.
        ranked = sorted(differences, key=lambda d: -abs(d.change or 0.0))[:_MOST]
        hidden = len(differences) - len(ranked)
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
        )
    return Group(*parts)


def _name(difference: Difference) -> str:
    what = difference.what
    return plain(what) if "@" in what else figure(what, 0)[0]  # a kernel's name stays as it is


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
