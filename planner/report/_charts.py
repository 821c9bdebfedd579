"""Stacked horizontal bars as inline SVG: `Bar` is one row, `bars` the chart with its legend.

Lengths are percentages and there is no view box, so that a chart fits a phone and a poster without
scaling its text. Colours are classes (``f0`` ...), which the page's style sheet gives a light and a
dark value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foreplan.planner.report._markup import Html, element, esc, words_of
from foreplan.planner.report.text import percent

COLOURS = 9
_WIDE = 640  # pixels of a bar on a desktop; decides whether a segment's text fits
_CHARACTER = 6.6  # pixels of one


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a bar.

    Attributes:
        name: what it is; the same name has the same colour in all rows.
        size: in the chart's unit.
        text: its size for readers.
    """

    name: str
    size: float
    text: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A row of a chart.

    Attributes:
        name: at its left.
        value: at its right.
        segments: from left to right.
        full: size that takes the whole width.
        thin: a second bar of the row above it.
        tone: class of the value's text (``tight``).
    """

    name: str
    value: str
    segments: tuple[Segment, ...]
    full: float
    thin: bool = False
    tone: str = ""


def palette(names: Sequence[str], special: Mapping[str, str] | None = None) -> dict[str, str]:
    """Class of each name, in order; what comes after the last colour shares the last."""
    special = special or {}
    ordinary = [name for name in dict.fromkeys(names) if name not in special]
    return {name: f"f{min(k, COLOURS - 1)}" for k, name in enumerate(ordinary)} | dict(special)


def bars(rows: Sequence[Bar], colours: Mapping[str, str]) -> Html:
    """The chart and its legend; a text alternative for each bar."""
    used = {segment.name for row in rows for segment in row.segments if segment.size > 0}
    legend = [
        element("li", element("span", class_=f"key {colour}"), name)
        for name, colour in colours.items()
        if name in used
    ]
    drawn = [_row(row, colours) for row in rows]
    return element("div", element("ul", *legend, class_="legend"), *drawn, class_="chart")


def _row(row: Bar, colours: Mapping[str, str]) -> Html:
    height = 10 if row.thin else 24
    at, drawn = 0.0, []
    for segment in row.segments:
        share = 100 * segment.size / row.full if row.full > 0 else 0.0
        share = min(share, 100 - at)
        if share <= 0:
            continue
        drawn.append(_segment(segment, at, share, height, colours[segment.name]))
        at += share
    spoken = ", ".join(f"{segment.name} {segment.text}" for segment in row.segments)
    chart = element(
        "svg",
        element("rect", class_="track", width="100%", height=height),
        *drawn,
        class_="bar",
        width="100%",
        height=height,
        role="img",
        aria_label=f"{words_of(row.name)}: {spoken}",
    )
    name = element("span", row.name, class_="name")
    value = element("span", row.value, class_=f"value {row.tone}".strip())
    return element("div", name, chart, value, class_="row thin" if row.thin else "row")


def _segment(segment: Segment, at: float, share: float, height: int, colour: str) -> Html:
    text = f"{segment.name} {segment.text}"
    fits = height >= 20 and share / 100 * _WIDE > _CHARACTER * len(text) + 14
    label = element("text", text, x=7, y=16) if fits else Html("")
    hover = element("title", f"{text} ({percent(share / 100)})")
    return element(
        "svg",
        hover,
        element("rect", class_=colour, width="100%", height=height),
        label,
        x=f"{at:.3f}%",
        width=f"{share:.3f}%",
        height=height,
        class_=f"on-{colour}",
    )


def meter(share: float, tone: str) -> Html:
    """A small bar of how much of a limit is used."""
    filled = 100 * min(max(share, 0.0), 1.0)
    return element(
        "svg",
        element("rect", class_="track", width="100%", height=10),
        element("rect", class_=f"meter-{esc(tone)}", width=f"{filled:.2f}%", height=10),
        class_="meter",
        width="100%",
        height=10,
        role="img",
        aria_label=f"{percent(share)} used",
    )
