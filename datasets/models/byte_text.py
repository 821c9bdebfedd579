"""Text without a network: the source of Python's standard library as a stream of bytes.

Whole files belong to one split by a hash of their path, so that no line of a validation file was
trained on. The text depends on the Python release, whose version goes beside every result.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sysconfig
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from foreplan.errors import MissingDataError

Split = Literal["train", "validation", "test"]
ByteArray = npt.NDArray[np.uint8]
Scalar = TypeVar("Scalar", bound=np.generic)

#: Parts of the tree that are no library text: tests, bundled wheels, generated tables.
_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "ensurepip",
                       "encodings", "pydoc_data", "__pycache__", "lib2to3", "idlelib",
                       "turtledemo"})  # fmt: skip


@functools.cache
def standard_library_text(split: Split) -> ByteArray:
    """Bytes of one split: 8 of 10 files train, 1 validation, 1 test.

    Returns:
        Read-only uint8 ``[bytes]``, files one after another in the order of their paths.

    Raises:
        MissingDataError: an installation without sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files: list[str] = []
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name not in _LEFT_OUT]  # not walked at all
        here = Path(folder).relative_to(root)
        files += [(here / name).as_posix() for name in names if name.endswith(".py")]
    files.sort()
    chosen = [name for name in files if _split_of(name) == split]
    if not chosen:
        raise MissingDataError(
            f"no Python sources in {root}", fix="use a Python whose standard library has sources"
        )
    text = np.frombuffer(b"".join((root / name).read_bytes() for name in chosen), np.uint8)
    text.flags.writeable = False
    return text


def windows(
    text: npt.NDArray[Scalar], count: int, length: int, key: tuple[int, ...]
) -> npt.NDArray[Scalar]:
    """Random windows of a text.

    Args:
        text: bytes or tokens ``[length of the text]``.
        count: how many.
        length: of each.
        key: non-negative numbers; equal keys give equal windows.

    Returns:
        ``[count, length]``.
    """
    starts = np.random.default_rng(key).integers(0, len(text) - length + 1, count)
    found: npt.NDArray[Scalar] = text[starts[:, None] + np.arange(length)]
    return found


def _split_of(name: str) -> Split:
    digit = hashlib.sha256(name.encode()).digest()[0] % 10
    return "validation" if digit == 0 else "test" if digit == 1 else "train"
