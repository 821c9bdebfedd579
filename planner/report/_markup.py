"""HTML pieces of the page: `Html` is text that is safe already, everything else gets escaped."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from foreplan.planner.report.text import plain


class Html(str):
    """Markup made by us; a plain ``str`` is a stranger's text until `esc` has seen it."""

    __slots__ = ()

    def __add__(self, other: str) -> Html:
        return Html(str.__add__(self, esc(other)))


#: A number and its unit stay on one line.
_UNIT = re.compile(r"(?<=\d) (?=(?:%|[mun]?s|(?:[KMGTP]i?)?B)(?![\w/]))")


def esc(text: object, limit: int = 400) -> Html:
    """Text for an element or an attribute; `Html` passes as it is."""
    if isinstance(text, Html):
        return text
    return Html(_UNIT.sub("&nbsp;", html.escape(plain(text, limit), quote=True)))


def breakable(text: str) -> Html:
    """A long name that may go on in the next line after ``/``, ``:`` or ``,``."""
    return Html(re.sub(r"([/:,])", r"\1<wbr>", esc(text)))


def rank_name(rank: int, device: str) -> Html:
    """``0 · t4``, which breaks only inside the name."""
    return Html(f"{rank}&nbsp;·&nbsp;") + breakable(device)


def join(parts: Iterable[object]) -> Html:
    """Pieces one after the other, escaped where they have to be."""
    return Html("".join(esc(part) for part in parts))


def element(name: str, *children: object, **attributes: object) -> Html:
    """``<name attributes>children</name>``; ``class_`` and ``aria_label`` lose their underscores.

    An attribute that is ``None`` is left out.
    """
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{esc(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{shown}>{join(children)}</{name}>")


def words_of(text: str) -> str:
    """Text as a reader hears it, without our markup."""
    return html.unescape(re.sub(r"<[^>]*>", "", text)) if isinstance(text, Html) else text


def section(title: str, *children: object, note: object | None = None) -> Html:
    """A titled part of the page; empty without content."""
    body = [child for child in children if child]
    if not body:
        return Html("")
    anchor = "-".join(word for word in plain(title).lower().split() if word.isalnum())
    lead = [element("p", note, class_="note")] if note else []
    heading = element("h2", title, id=f"h-{anchor}")
    return element("section", heading, *lead, *body, aria_labelledby=f"h-{anchor}")


def table(
    caption: str, head: Sequence[str], rows: Sequence[Sequence[object]], *, numeric: str = ""
) -> Html:
    """A table that becomes a list of records on a phone.

    Args:
        caption: what it shows, for everyone.
        head: column names.
        rows: cells; the first of a row is its header.
        numeric: ``n`` at the place of each column of numbers, as ``".nn."``.
    """
    if not rows:
        return Html("")
    kinds = ["num" if k < len(numeric) and numeric[k] == "n" else None for k in range(len(head))]
    titles = join(
        element("th", name, scope="col", class_=kind)
        for name, kind in zip(head, kinds, strict=True)
    )
    # A column of bare numbers needs no room for names.
    narrow = "index" if all(str(row[0]).isdigit() for row in rows) else None
    body = []
    for row in rows:
        cells = [element("th", row[0], scope="row", data_label=head[0], class_=narrow)]
        cells += [
            element("td", cell, data_label=name, class_=kind)
            for cell, name, kind in zip(row[1:], head[1:], kinds[1:], strict=True)
        ]
        body.append(element("tr", *cells))
    return element(
        "div",
        element(
            "table",
            element("caption", caption),
            element("thead", element("tr", titles)),
            element("tbody", *body),
        ),
        class_="table",
    )


def details(summary: str, *children: object) -> Html:
    """Content that is folded away until asked for (and open on paper)."""
    body = [child for child in children if child]
    return element("details", element("summary", summary), *body) if body else Html("")


def definitions(pairs: Iterable[tuple[object, object]]) -> Html:
    """Names and values."""
    rows = [element("div", element("dt", name), element("dd", value)) for name, value in pairs]
    return element("dl", *rows) if rows else Html("")


def data_block(name: str, document: Any) -> Html:
    """JSON for a script; nothing in it can end the element or start another."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Html(f'<script type="application/json" id="{esc(name)}">{text}</script>')
