"""How reports write names and numbers: `plain`, `figure` and the small formats they share.

A plan may come from a stranger. What goes to a terminal or a page passes through `plain`, so that
no escape sequence reaches a terminal and no invisible character turns a line around.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from foreplan.datasets.quantity import (
    format_bandwidth,
    format_bytes,
    format_rate,
    format_seconds,
)

UNKNOWN = "–"
_LONGEST = 400  # characters of one text; a name needs twenty


def plain(text: object, limit: int = _LONGEST) -> str:
    """A stranger's text on one line, without control or direction characters, cut at ``limit``."""
    shown = "".join(c if c.isprintable() else " " for c in str(text))
    shown = " ".join(shown.split())
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def percent(share: float | None, *, signed: bool = False) -> str:
    """A share as ``12 %``, two digits below ten; ``signed`` shows a plus."""
    if share is None or not math.isfinite(share):
        return UNKNOWN
    value = 100 * share
    digits = 0 if abs(value) >= 9.95 else 1
    text = f"{value:+.{digits}f}" if signed else f"{value:.{digits}f}"
    if float(text) == 0:
        text = "0"
    return f"{text} %"


def seconds(value: float | None) -> str:
    """A time to four digits, or a dash."""
    return UNKNOWN if value is None or not math.isfinite(value) else format_seconds(value)


def bytes_of(size: float | None) -> str:
    """A size to four digits, or a dash."""
    return UNKNOWN if size is None or not math.isfinite(size) else format_bytes(size)


def run_seconds(measured_s: float | None) -> str:
    """Measured time of a phase; of one that only plans have, where its time went in the run."""
    return "in the others" if measured_s is None else seconds(measured_s)


def words(name: str) -> str:
    """A field's name for readers: ``time_to_first_token`` is ``time to first token``."""
    return plain(name.replace("_", " ").strip())


def figure(name: str, value: Any) -> tuple[str, str]:
    """A named value for readers, its unit taken from the name.

    Args:
        name: as in the document: ``..._s``, ``..._bytes``, ``..._tokens_per_s``, ``..._share``.
        value: what stands there.

    Returns:
        (label without the unit, value with the unit).
    """
    if isinstance(value, bool):
        return words(name), "yes" if value else "no"
    if isinstance(value, int | float):
        stem, text = _number(name, float(value))
        return words(stem), text
    return words(name), compact(value)


def _number(name: str, value: float) -> tuple[str, str]:
    for suffix, show in (
        ("_bytes_per_s", format_bandwidth),
        ("_flops", format_rate),
        ("_bytes", bytes_of),
        ("_share", percent),
        ("_rate", percent),
    ):
        if name.endswith(suffix) and name != "learning_rate":  # which is no share
            return name.removesuffix(suffix), show(value)
    if name.endswith("_per_s"):
        stem, _, counted = name.removesuffix("_per_s").rpartition("_")
        return stem or counted, f"{number(value)} {plain(counted)}/s"
    if name.endswith("_s"):
        return name.removesuffix("_s"), seconds(value)
    return name, number(value)


def number(value: float) -> str:
    """A bare number: whole where it is whole, else to four digits."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.4g}"


def compact(value: Any) -> str:
    """Any plain value in few characters: ``16 ×3, 8 ×9`` for a list of numbers of bits."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, Mapping):
        return plain(
            ", ".join(f"{plain(k)} {compact(v)}" for k, v in value.items() if v is not None)
        )
    if isinstance(value, list | tuple):
        return runs(value)
    return plain(value)


def runs(values: Iterable[Any], most: int | None = None) -> str:
    """A list with repeats counted; one value if all are equal.

    Args:
        values: the list.
        most: beyond so many runs, values are counted wherever they stand: ``mixed: 8 ×9, 4 ×7``.
    """
    counted = run_lengths(compact(value) for value in values)
    if not counted:
        return "none"
    if len(counted) == 1:
        return counted[0][0]
    if most is not None and len(counted) > most:
        totals: dict[str, int] = {}
        for text, n in counted:
            totals[text] = totals.get(text, 0) + n
        ordered = sorted(totals.items(), key=lambda item: -item[1])
        return "mixed: " + plain(", ".join(f"{text} ×{n}" for text, n in ordered))
    return plain(", ".join(text if n == 1 else f"{text} ×{n}" for text, n in counted))


def run_lengths(texts: Iterable[str]) -> list[tuple[str, int]]:
    """Neighbouring equal texts as (text, how many)."""
    return [(text, sum(1 for _ in group)) for text, group in itertools.groupby(texts)]
