"""`plain_words`: signs that a terminal without UTF-8 cannot show become words of ASCII.

A name of a file may hold bytes that are no text in any encoding; they are shown as ``?``.
"""

from __future__ import annotations

import codecs
import io
from types import MappingProxyType
from typing import TextIO

#: What tables and messages say, and how to say it with less.
_PLAIN = MappingProxyType(
    {"–": "-", "—": "-", "−": "-", "×": "x", "·": "|", "…": "...", "→": "->", "←": "<-", "≤": "<=",
     "≥": ">=", "µ": "u", "μ": "u", "±": "+-"}
)  # fmt: skip


def plain_words(*streams: TextIO) -> None:
    """Let streams write what their encoding lacks in ASCII, instead of failing halfway."""
    codecs.register_error("foreplan.plain", _plain)
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):  # not a test's or a notebook's own
            stream.reconfigure(errors="foreplan.plain")


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_PLAIN.get(sign, "?") for sign in lacking), error.end
