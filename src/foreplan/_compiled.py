"""`compiled`: numba's compiler as our inner loops use it, its code kept on disk where possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Any:
    """Compile when first called, without the interpreter's lock, and keep the machine code.

    numba keeps it beside the module or, where that is read-only, in the user's cache folder; with
    neither it refuses, and then every process compiles for itself (seconds) instead of failing.
    """
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # "no locator available": nowhere to write
        return numba.njit(nogil=True)(function)
