"""`Reader`: something that reads, with a valid input and all its mutants."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.robustness.mutations import as_json, broken_bytes, broken_document

Read = Callable[[Path], Any]


@dataclass(frozen=True)
class Reader:
    """A reader with what it reads.

    Attributes:
        name: for the test's id.
        read: reads a file, and uses what it read as the commands do.
        document: a valid document, plain data; its mutants are written by ``dump``.
        data: a valid file's bytes, where it is no document (or beside it).
        file: name of the file that is broken.
        beside: files around it that are not.
        dump: how documents are written.
    """

    name: str
    read: Read
    document: Callable[[], Any] | None = None
    data: Callable[[], bytes] | None = None
    file: str = "input.json"
    beside: Callable[[], Mapping[str, bytes]] = field(default=dict)
    dump: Callable[[Any], bytes] = as_json

    def valid_bytes(self) -> bytes:
        """The valid file."""
        if self.data is not None:
            return self.data()
        assert self.document is not None
        return self.dump(self.document())

    def mutant(self, seed: int) -> bytes:
        """A broken file, by its seed: even ones are broken as documents, odd ones as bytes."""
        random = Random(f"{self.name}/{seed}")
        if self.document is not None and seed % 2 == 0:
            return self.dump(broken_document(random, self.document()))
        return broken_bytes(random, self.valid_bytes())

    def attempt(self, folder: Path, data: bytes) -> None:
        """Write the files into a fresh folder and read the broken one."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, content in self.beside().items():
            (folder / name).write_bytes(content)
        (folder / self.file).write_bytes(data)
        self.read(folder / self.file)
