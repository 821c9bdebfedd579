"""`ExportRecord`: which files of a folder an export wrote, whatever its target.

It lies beside them in the format of ``sha256sum``, which checks it too. By it the next export into
the folder removes what it does not replace: a folder never holds two plans.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

#: The record's own name.
RECORD_FILE = "export.sha256"
_LINE = re.compile(r"([0-9a-f]{64})  ([^/\\\0]+)")


@dataclass(frozen=True, slots=True)
class ExportRecord:
    """Files of one export.

    Attributes:
        digests: SHA-256 of each file's content, in hexadecimal digits, by the file's name.
    """

    digests: Mapping[str, str]

    @classmethod
    def of(cls, files: Mapping[str, str]) -> ExportRecord:
        """The record of files that are about to be written, text by name."""
        return cls({name: _digest(text.encode("utf-8")) for name, text in files.items()})

    @classmethod
    def read(cls, folder: Path) -> ExportRecord:
        """The record that lies in a folder; without files where there is none.

        Lines that no export wrote are passed over: what they name stays.
        """
        try:
            text = (folder / RECORD_FILE).read_text(encoding="utf-8")
        except (OSError, ValueError):
            return cls({})
        found = filter(None, map(_LINE.fullmatch, text.splitlines()))
        return cls({match[2]: match[1] for match in found if match[2] != RECORD_FILE})

    @property
    def text(self) -> str:
        """The record's file."""
        return "".join(f"{digest}  {name}\n" for name, digest in sorted(self.digests.items()))

    def holds(self, folder: Path, name: str) -> bool:
        """Whether a file of the folder is still what the export wrote."""
        path = folder / name
        try:
            return path.is_file() and _digest(path.read_bytes()) == self.digests.get(name)
        except OSError:
            return False

    def remove_others(self, folder: Path, files: Mapping[str, str]) -> None:
        """Remove what this export wrote and ``files`` do not replace; what was edited stays."""
        for name in self.digests:
            if name not in files and self.holds(folder, name):
                with contextlib.suppress(FileNotFoundError):  # another export was faster
                    (folder / name).unlink()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
