"""`Grid`: a rich table that leaves out columns which a narrow terminal has no room for.

Cells are texts of strangers: they are shown as they are, never read as rich's markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from foreplan.planner.report.text import plain


@dataclass(frozen=True, slots=True)
class Column:
    """A column.

    Attributes:
        name: header.
        cells: one a row.
        numeric: aligned right and never broken.
        least: width of the terminal from which on the column is shown.
    """

    name: str
    cells: Sequence[str | Text]
    numeric: bool = False
    least: int = 0


@dataclass(frozen=True)
class Grid:
    """A titled table; prints nothing without rows."""

    title: str
    columns: Sequence[Column]
    note: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw for the width at hand."""
        shown = [column for column in self.columns if column.least <= options.max_width]
        if not shown or not shown[0].cells:
            return
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
        for column in shown:
            table.add_column(
                column.name,
                justify="right" if column.numeric else "left",
                no_wrap=column.numeric,
                overflow="fold",
                header_style="bold",
            )
        for row in zip(*(column.cells for column in shown), strict=True):
            table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
        yield Text()
        yield Text(self.title, style="bold")
        yield table
        if self.note:
            yield Text(self.note, style="dim")


Tone = Literal["good", "warn", "bad", ""]
_STYLES = {"good": "green", "warn": "yellow", "bad": "bold red", "": ""}


def toned(text: str, tone: Tone) -> Text:
    """Text in a colour that only repeats what the word says already."""
    return Text(text, style=_STYLES[tone])


@dataclass(frozen=True)
class Facts:
    """Names and values, a line each, values aligned; long values go on below their start."""

    pairs: Sequence[tuple[str, str | Text]] = field(default_factory=tuple)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw for the width at hand."""
        if not self.pairs:
            return
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", overflow="fold", max_width=max(18, options.max_width // 3))
        table.add_column(overflow="fold")
        for name, value in self.pairs:
            table.add_row(Text(name), value if isinstance(value, Text) else Text(value))
        yield table


@dataclass(frozen=True, slots=True)
class Narrow:
    """A line for terminals that are too narrow for the column which says the same."""

    text: Text
    below: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw for the width at hand."""
        if options.max_width < self.below:
            yield self.text


def heading(text: str) -> Text:
    """A line above what follows."""
    return Text(f"\n{plain(text, 1000)}", style="bold")


def bullets(lines: Iterable[str]) -> list[RenderableType]:
    """A list whose long items are indented where they go on."""
    drawn: list[RenderableType] = []
    for line in lines:
        table = Table.grid(padding=(0, 1))
        table.add_column()
        table.add_column(overflow="fold")
        table.add_row(Text("-"), Text(plain(line, 1000)))
        drawn.append(table)
    return drawn
