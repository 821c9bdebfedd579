"""`Grid`: a rich table that leaves out, and names, columns that a narrow terminal has no room for.

Where even the others would have to be broken within a word, rows become records: a cell a line, and
none left out.

Cells are texts of strangers: they are shown as they are, never read as rich's markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from foreplan.planner.report.text import plain

#: Blanks between two columns.
_BETWEEN = 3


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
        yield Text()
        yield Text(self.title, style="bold")
        widths = _widths(shown, options.max_width)
        if widths is None and len(shown) > 1:
            yield from _records(self.columns)
        else:
            yield _table(shown, widths)
            left_out = [column.name for column in self.columns if column.least > options.max_width]
            if left_out:
                yield Text(f"too narrow for: {', '.join(left_out)}", style="dim")
        if self.note:
            yield Text(self.note, style="dim")


def _table(shown: Sequence[Column], widths: Sequence[int] | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
    for place, column in enumerate(shown):
        table.add_column(
            column.name,
            justify="right" if column.numeric else "left",
            overflow="fold",
            header_style="bold",
            width=None if widths is None else widths[place],
        )
    for row in zip(*(column.cells for column in shown), strict=True):
        table.add_row(*(_text(cell) for cell in row))
    return table


def _widths(shown: Sequence[Column], room: int) -> list[int] | None:
    """A width for each column in which no word and no number is broken, ``None`` without any.

    Rich itself takes room from all columns alike, within words.
    """
    least = [_longest(column) for column in shown]
    spare = room - _BETWEEN * (len(shown) - 1) - sum(least)
    if spare < 0:
        return None
    lines = [[column.name, *(str(cell) for cell in column.cells)] for column in shown]
    wanted = [max(map(cell_len, cells)) - small for cells, small in zip(lines, least, strict=True)]
    widths = list(least)
    # Who wants least is served first, so that one long text does not make all others wrap.
    for left, place in enumerate(sorted(range(len(shown)), key=lambda k: wanted[k])):
        given = min(wanted[place], spare // (len(shown) - left))
        widths[place] += given
        spare -= given
    return widths


def _records(shown: Sequence[Column]) -> Iterator[RenderableType]:
    for first, *others in zip(*(column.cells for column in shown), strict=True):
        yield _text(first)
        names = (column.name for column in shown[1:])
        yield Padding(Facts([*zip(names, others, strict=True)]), (0, 0, 0, 2))


def _text(cell: str | Text) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)


def _longest(column: Column) -> int:
    """Width of a column's longest word, or number."""
    whole = column.numeric
    cells = [word for cell in column.cells for word in ([cell] if whole else str(cell).split())]
    return max((cell_len(str(word)) for word in [*column.name.split(), *cells]), default=0)


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
            table.add_row(Text(name), _text(value))
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
