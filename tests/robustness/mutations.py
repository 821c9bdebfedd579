"""Valid documents and files, broken a little: every mutant is a function of a seed."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

import yaml

#: Values that stand where another belongs.
JUNK: tuple[Any, ...] = (
    None, True, False, "", " ", "x", "0", "-1", "NaN", "1e999", "\x00", "\ud800", "é☃𝄞",
    "a\nb", "../../../etc/passwd", "/dev/zero", "{}", "<script>", "2x", "cpu:threads=0",
    0, 1, -1, 3, 255, 1 << 31, 1 << 53, (1 << 63) - 1, 1 << 63, -(1 << 63), 1 << 64, 10**30,
    10**400, -(10**400), 0.5, -0.0, 1e-320, 1e18, 1e308, -1e308,
    float("nan"), float("inf"), float("-inf"),
    [], [[]], [None], {}, {"": None}, {"x": {"y": [1, "2"]}},
)  # fmt: skip


def deep(levels: int) -> Any:
    """Lists in lists."""
    made: Any = 0
    for _ in range(levels):
        made = [made]
    return made


def paths(document: Any, most: int = 4000) -> list[tuple[Any, ...]]:
    """Where something stands in a document, breadth first; the top itself is ``()``."""
    found: list[tuple[Any, ...]] = [()]
    for path in found:
        if len(found) > most:
            break
        value = at(document, path)
        if isinstance(value, dict):
            found += [(*path, key) for key in value]
        elif isinstance(value, list):
            # Long lists are alike inside: their ends and two within stand for the rest.
            size = len(value)
            chosen = range(size) if size <= 6 else sorted({0, 1, size // 2, size - 1})
            found += [(*path, index) for index in chosen]
    return found


def at(document: Any, path: tuple[Any, ...]) -> Any:
    """What stands there."""
    for part in path:
        document = document[part]
    return document


def put(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The document with another value there."""
    if not path:
        return value
    at(document, path[:-1])[path[-1]] = value
    return document


def broken_document(random: Random, valid: Any) -> Any:
    """``valid`` with one to three things wrong, most often one."""
    document = copy.deepcopy(valid)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        document = _break(random, document)
    return document


def _break(random: Random, document: Any) -> Any:
    places = paths(document)
    path = random.choice(places)
    value = at(document, path)
    how = random.choice(
        ("junk", "junk", "scale", "retype", "drop", "add", "repeat", "graft", "deep")
    )
    if how == "scale" and isinstance(value, int | float) and not isinstance(value, bool):
        factor = random.choice((-1, 0, 2, 7, 10**6, 10**12))
        return put(document, path, factor * value if abs(value) < 1e200 else -value)
    if how == "retype":
        changed = [value] if not isinstance(value, str) else list(value[:50])
        return put(document, path, random.choice((str(value)[:200], changed, {"v": value})))
    if how == "drop" and path:
        del at(document, path[:-1])[path[-1]]
        return document
    if how == "add" and isinstance(value, dict):
        value[random.choice(("extra", "", "name", "__class__", "count", "é"))] = _junk(random)
        return document
    if how == "repeat" and isinstance(value, list) and value:
        return put(document, path, value * random.choice((2, 3, 1000)))
    if how == "graft":
        return put(document, path, copy.deepcopy(at(document, random.choice(places))))
    if how == "deep":
        made = random.choice((deep(90), deep(300), [0] * 20_000, "long " * 20_000))
        return put(document, path, made)
    return put(document, path, _junk(random))


def _junk(random: Random) -> Any:
    return copy.deepcopy(random.choice(JUNK))


def broken_bytes(random: Random, valid: bytes) -> bytes:
    """``valid`` cut, flipped, doubled, in another encoding, or with bytes put in."""
    data = valid
    for _ in range(random.choice((1, 1, 2))):
        where = random.randint(0, len(data))
        how = random.choice(("cut", "flip", "insert", "double", "encode", "line", "number"))
        if how == "cut":
            data = data[:where]
        elif how == "flip" and where < len(data):
            flipped = bytes([data[where] ^ random.randint(1, 255)])
            data = data[:where] + flipped + data[where + 1 :]
        elif how == "insert":
            data = data[:where] + random.choice(_INSERTS) + data[where:]
        elif how == "double":
            data = data[:where] + data
        elif how == "line":
            lines = data.split(b"\n")
            line = random.randrange(len(lines))
            data = b"\n".join([*lines[: line + 1], *lines[line:]])
        elif how == "number":
            digits = [i for i, byte in enumerate(data[:100_000]) if 48 <= byte <= 57]
            if digits:
                place = random.choice(digits)
                data = data[:place] + random.choice(_NUMBERS) + data[place + 1 :]
        elif len(data) < 1 << 20:
            text = data.decode("utf-8", errors="replace")
            coding = random.choice(("utf-16", "utf-8-sig", "utf-32", "latin-1"))
            data = text.encode(coding, errors="replace")
    return data


_INSERTS = (
    b"\x00", b"\xff\xfe", b"\n", b"[" * 200_000, b"{" * 100_000, b'"', b"\xed\xa0\x80", b"&a *a",
    b"!!python/object:os.system", b": ", b"---\n", b"\t", b"9" * 6000, b"<<: *x\n", b"\xc2\x85",
    b"NaN", b"\\ud800",
)  # fmt: skip
_NUMBERS = (b"9" * 25, b"9" * 5000, b"-1", b"1e999", b"0", b"NaN", b"\xd9\xa3", b"")


def as_json(document: Any) -> bytes:
    """The document as JSON, surrogates escaped, NaN and infinity as Python writes them."""
    return json.dumps(document).encode()


def as_yaml(document: Any) -> bytes:
    """The document as YAML; what YAML has no words for goes as JSON."""
    try:
        return yaml.safe_dump(document, sort_keys=False, allow_unicode=True).encode()
    except (yaml.YAMLError, RecursionError, UnicodeEncodeError):
        return as_json(document)
