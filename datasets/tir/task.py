"""Task: the unscheduled tensor program of one fused operator, and who calls it how often."""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from foreplan.errors import SpecError

#: Of an unpacked module: zlib packs a thousand zeros into one byte.
_MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Task:
    """An unscheduled TIR module with its callers.

    Attributes:
        key: 16 hexadecimal digits of the structural hash; names do not count.
        name: what a reader calls it (``fused_conv2d_add_relu``); not unique.
        module: JSON text of ``tvm.ir.save_json`` of the unscheduled module.
        calls: network at a shape (``bert-base/batch=1,tokens=128``) to calls of one pass.
        families: families of those networks, held out together.
    """

    key: str
    name: str
    module: str
    calls: Mapping[str, int]
    families: frozenset[str]


def merge(tasks: Iterable[Task]) -> list[Task]:
    """Join tasks of equal key: a task stands once, with all its callers. Order of first sight."""
    found: dict[str, Task] = {}
    for task in tasks:
        known = found.get(task.key)
        if known is None:
            found[task.key] = task
            continue
        calls = dict(known.calls)
        for label, count in task.calls.items():
            # The same network at the same shape was captured again, not called again.
            calls[label] = max(count, calls.get(label, 0))
        found[task.key] = replace(
            known, calls=MappingProxyType(calls), families=known.families | task.families
        )
    return list(found.values())


def program_key(module: str) -> str:
    """Key of a program: 16 hexadecimal digits of a hash of its JSON text, names included."""
    return hashlib.blake2b(module.encode(), digest_size=8).hexdigest()


def encode_module(text: str) -> str:
    """Pack a module's JSON text as files keep it: base64 of zlib."""
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def decode_module(packed: str, where: str = "mod") -> bytes:
    """Return the JSON text (UTF-8) of a packed module.

    Args:
        packed: base64 of zlib of ``tvm.ir.save_json``.
        where: file, line and field, for the error.

    Raises:
        SpecError: not base64, not zlib, cut off, or of more than 16 MiB.
    """
    unpack = zlib.decompressobj()
    try:
        text = unpack.decompress(base64.b64decode(packed, validate=True), _MAX_BYTES)
        if not unpack.eof:
            raise ValueError(f"cut off, or more than {_MAX_BYTES} bytes")
        return text
    except (binascii.Error, zlib.error, ValueError) as error:
        raise SpecError(
            where, got=str(packed), expected=f"base64 of zlib of a TVM module ({error})"
        ) from error
