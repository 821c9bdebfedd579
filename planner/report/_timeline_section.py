"""The page's timeline: what ``gantt.js`` draws on, its data, and a screen reader's words for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foreplan.planner.report._markup import Html, data_block, element, rank_name, section
from foreplan.planner.report.gantt import busy_seconds
from foreplan.planner.report.summary import short_labels
from foreplan.planner.report.text import seconds

_MOVES = (
    ("left", "←", "Earlier"),
    ("right", "→", "Later"),
    ("in", "+", "Zoom in"),
    ("out", "−", "Zoom out"),
    ("all", "All", "Show all"),
)


def timeline_data(drawn: Mapping[str, dict[str, Any]]) -> Html:
    """The data block of the script; empty where nothing is drawn.

    Args:
        drawn: `gantt_document` by name (``predicted``, ``measured``).
    """
    if not drawn:
        return Html("")
    documents = [{"name": name, **document} for name, document in drawn.items()]
    return data_block("timeline-data", {"timelines": documents})


def timeline_section(drawn: Mapping[str, dict[str, Any]]) -> Html:
    """A canvas a rank; see `timeline_data`."""
    if not drawn:
        return Html("")
    documents = list(drawn.values())
    devices = max((document["devices"] for document in documents), key=len)
    lanes = [_lane(rank, device, drawn) for rank, device in enumerate(short_labels(devices))]
    axis = element(
        "div",
        element("div", class_="name"),
        element("div", class_="which"),
        element("canvas", aria_hidden="true"),
        class_="lane axis",
    )
    drawing = element(
        "div",
        axis,
        *lanes,
        class_="drawing",
        tabindex="0",
        role="group",
        aria_label="Timeline; arrow keys move, plus and minus zoom, 0 shows all",
    )
    body = element(
        "div",
        element("ul", class_="legend"),
        _tools(),
        drawing,
        element("div", class_="tip", role="status", hidden="hidden"),
        element("noscript", element("p", "The timeline needs JavaScript.")),
        id="timeline",
    )
    note = "Drag to move, Ctrl and wheel or pinch to zoom; the thin strips are transfers."
    if len(documents) > 1:
        note = f"{' above '.join(drawn).capitalize()}. {note}"
    if any(document["joined"] for document in documents):
        note += " Neighbouring actions are joined: there are too many for one page."
    return section("Timeline", body, note=note)


def _lane(rank: int, device: str, drawn: Mapping[str, dict[str, Any]]) -> Html:
    spoken = "; ".join(
        f"{name} busy {seconds(busy_seconds(document, rank))} of "
        f"{seconds(document['makespan'] * document['tick_s'])}"
        for name, document in drawn.items()
        if rank < len(document["ranks"])
    )
    title = element("div", rank_name(rank, device), class_="name")
    which = element("div", *(element("span", name) for name in drawn), class_="which")
    canvas = element(
        "canvas", data_rank=rank, role="img", aria_label=f"Rank {rank}, {device}: {spoken}"
    )
    return element("div", title, which, canvas, class_="lane")


def _tools() -> Html:
    buttons = [
        element("button", sign, type="button", data_move=move, aria_label=name, title=name)
        for move, sign, name in _MOVES
    ]
    view = element("div", element("span"), class_="view", aria_hidden="true")
    shown = element("span", class_="range", aria_live="polite")
    return element("div", *buttons, shown, class_="tools") + view
