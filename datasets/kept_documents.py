"""`KeptDocument`: what takes seconds to find out, kept on disk by all that it depends on.

One JSON file each below ``$FOREPLAN_CACHE`` (default ``$XDG_CACHE_HOME/foreplan``, else
``~/.cache/foreplan``), named by a hash of the given facts, the versions of torch and transformers,
and the code of the packages that describe, capture and lower models. Of those that have not been
used for longest so many are deleted that `MOST_FILES` and `MOST_BYTES` are left at most.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from foreplan.datasets.storage import write_atomically
from foreplan.errors import ForeplanError, SpecError

T = TypeVar("T")

#: What a folder holds at most, in files and bytes.
MOST_FILES, MOST_BYTES = 1000, 64 << 20
#: Names of the files: what else lies in a user's folder is left alone.
_NAME = re.compile(r"[0-9a-f]{24}\.json")


class KeptDocument:
    """One document; a folder that cannot be read or written is no error.

    Args:
        *facts: what it depends on beside versions and code, as JSON; the name of its form first.
        folder: instead of the usual one.
    """

    def __init__(self, *facts: object, folder: Path | None = None) -> None:
        known = [*facts, _code(), _version("torch"), _version("transformers")]
        digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:24]
        self.path = (folder or _usual_folder()) / f"{digest}.json"

    def read(self, parse: Callable[[Any], T]) -> T | None:
        """What is kept, parsed; ``None`` where nothing is, or what does not parse."""
        try:
            found = parse(json.loads(self.path.read_text(encoding="utf-8")))
            with contextlib.suppress(OSError):
                os.utime(self.path)  # used now
            return found
        except (
            OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError,
            ForeplanError,
        ):  # fmt: skip
            return None

    def keep(self, document: object) -> None:
        """Write it in the place of what was kept."""
        with contextlib.suppress(OSError, SpecError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(document))
            _prune(self.path.parent)


def _prune(folder: Path) -> None:
    """Delete what has not been used for longest, beyond the limits.

    Other processes may read, write and prune beside it: each file is whole, and one that is gone
    is made again by who wants it.
    """
    files: list[tuple[int, int, Path]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    about = entry.stat(follow_symlinks=False)
                    files.append((about.st_mtime_ns, about.st_size, folder / entry.name))
    size = 0
    for place, (_, own, path) in enumerate(sorted(files, reverse=True)):
        size += own
        if place >= MOST_FILES or size > MOST_BYTES:
            path.unlink(missing_ok=True)


def _usual_folder() -> Path:
    own = os.environ.get("FOREPLAN_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "foreplan"


@functools.cache
def _code() -> str:
    """Digest of what decides how a pass is captured and lowered: after a change, none of before."""
    root = Path(__file__).resolve().parents[1]
    sources = (path for name in ("cost_models", "datasets") for path in (root / name).rglob("*.py"))
    found = hashlib.sha256()
    for path in sorted(sources):
        found.update(path.read_bytes())
    return found.hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
