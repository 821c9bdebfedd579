"""part and STAMP: how the parts of the program encoder are compiled, and when again.

Only the outermost function, `_tir_encoding.encode`, keeps its machine code on disk; the others are
compiled into it. numba renews that code when the outermost function's own file changes, but not
when another file does, which after a ``git pull`` would mean old code and new names. So the
machine code carries the checksum of all the sources, and its caller compares.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba


def part(function: Callable[..., Any]) -> Any:
    """Compile when first called, as a part of a compiled caller; nothing is kept on disk.

    Once for the types of its arguments: by itself numba does it anew for every constant that a
    caller passes or that a caller's variable starts with, some parts 15 times. And for compiled
    callers only: code that unpacks two dozen arguments from Python is long to compile, too.
    """
    njit: Any = numba.njit  # its annotations lack the two options
    dispatcher = njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    unliteral: Any = numba.types.unliteral
    template = dispatcher.get_call_template

    def of_types(kinds: Any, named: Any) -> Any:
        return template(
            tuple(unliteral(kind) for kind in kinds),
            {name: unliteral(kind) for name, kind in named.items()},
        )

    dispatcher.get_call_template = of_types
    return dispatcher


def _checksum() -> int:
    folder = Path(__file__).parent
    try:
        sources = sorted((*folder.glob("_tir_*.py"), *folder.glob("_leaf_*.py")))
        return zlib.crc32(b"".join(path.read_bytes() for path in sources))
    except OSError:  # no source files, which then do not change either
        return 0


STAMP = _checksum()
