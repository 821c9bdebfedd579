"""Specs: the base of every description read from a file, and how one is read and checked.

A spec is a YAML or JSON document checked by a `StrictModel`. Whatever is wrong with it becomes
one `SpecError` line: file, field, what stands there, what should.

YAML is read as version 1.2 has it, not 1.1: ``1e9`` is a number, ``no`` and ``2024-01-01`` are
texts, ``010`` is ten. A JSON file means the same when read as YAML.
"""

from __future__ import annotations

import difflib
import gzip
import os
import re
import types
import typing
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticSerializationError, to_json

from foreplan.datasets._document_text import (
    MAX_JSON_BYTES,
    MAX_YAML_BYTES,
    Words,
    parse_json,
    parse_yaml,
    refuse_large,
    write_yaml,
)
from foreplan.errors import SpecError

#: More errors than these are not listed one by one: a kilobyte each.
_MAX_ERRORS = 10_000
#: More missing fields than these are counted, not named.
_MAX_NAMES = 8
#: Of a record whose fields contradict each other no more characters than these are shown.
_MOST_SHOWN = 100


class StrictModel(BaseModel):
    """A frozen record that takes no unknown field, no NaN or infinity, and no other type.

    ``True`` is no number, ``"8"`` is no count, ``1.5`` is no count. From a document (through
    `validate`) a list fills a tuple; in Python a tuple is needed. Sizes are bounded field by
    field (``Field(gt=0)``). A validator of a subclass raises ``ValueError`` with the text of what
    was *expected*; `validate` adds the file, the field and the value.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=False,
        ser_json_inf_nan="constants",
    )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read and check a YAML or JSON file.

        Raises:
            SpecError: as `load_document` and `validate`.
        """
        return validate(cls, load_document(path), os.fspath(path))


Model = TypeVar("Model", bound=BaseModel)


def load_document(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a YAML or JSON (by the ending ``.json``) document whose top is a mapping.

    Behind either ending may stand ``.gz``. Only plain data is built: a YAML tag that would
    construct an object is an error.

    Args:
        path: the file, in UTF-8.

    Returns:
        The document, unchecked; see `validate`.

    Raises:
        SpecError: no such file, not gzip's, not UTF-8, empty, too long, a syntax error (with its
            line), a key given twice (with its line), NaN or infinity in JSON, or a top that is not
            a mapping.
    """
    where = os.fspath(path)
    packed = where.lower().endswith(".gz")
    json_text = where.lower().removesuffix(".gz").endswith(".json")
    longest = MAX_JSON_BYTES if json_text else MAX_YAML_BYTES
    try:
        with gzip.open(path) if packed else Path(path).open("rb") as stream:
            data = stream.read(longest + 1)  # a file may have no end: /dev/zero
    # A name with a null byte is a ValueError; the last two are of a file that is not gzip's.
    except (OSError, ValueError, EOFError, zlib.error) as error:
        got = getattr(error, "strerror", None) or str(error)
        raise SpecError(where, got=got, expected="a readable file", fix=_inside(path)) from error
    if len(data) > longest:
        raise SpecError(
            where, got=Words(f"more than {longest} bytes"),
            expected=f"at most {MAX_YAML_BYTES} bytes of YAML or {MAX_JSON_BYTES} of JSON",
        )  # fmt: skip
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(
            where, got=f"bytes that are not UTF-8 (at byte {error.start})", expected="a text file"
        ) from error
    parse = parse_json if json_text else parse_yaml
    try:
        document = parse(text, where)
        refuse_large(document, where)
    except RecursionError as error:
        raise SpecError(
            where, got="brackets nested too deeply", expected="a plain document"
        ) from error
    if document is None:
        raise SpecError(where, got=Words("nothing"), expected="a document with fields")
    if not isinstance(document, dict):
        raise SpecError(
            where, got=document, expected="a mapping of fields at the top of the document"
        )
    return document


def _inside(path: str | os.PathLike[str]) -> str | None:
    """A hint where a folder was named in place of the one document in it."""
    folder = Path(path)
    try:
        found = [p for p in sorted(folder.iterdir()) if p.suffix in (".yaml", ".yml")]
    except (OSError, ValueError):
        return None
    return f"did you mean {found[0]}?" if len(found) == 1 else None


def rows_document(record: BaseModel, rows: str) -> str:
    """A record as JSON with a line for each member of its field ``rows``, which comes last.

    Fields that are None are left out; equal records give equal bytes.
    """
    head = record.model_dump_json(by_alias=True, exclude_none=True, exclude={rows})
    lines = ",\n".join(row.model_dump_json(exclude_none=True) for row in getattr(record, rows))
    return f'{head[:-1]},"{rows}":[\n{lines}\n]}}\n'


def dump_document(data: Mapping[str, Any]) -> str:
    """Write plain data as YAML that `load_document` reads back equal; same data, same bytes."""
    return write_yaml(data)


def validate(model_cls: type[Model], data: object, where: str) -> Model:
    """Check plain data against a model.

    Args:
        model_cls: what the data should be.
        data: mappings, lists, texts, numbers (what `load_document` or ``json`` returns); numpy's
            numbers and arrays count as these.
        where: file or argument the data comes from; begins the error's line.

    Returns:
        The checked, frozen record.

    Raises:
        SpecError: the first thing wrong (an unknown field before all else, because a misspelt
            one also shows as a missing one) and how many more there are; brackets nested too
            deeply; half a character (a lone surrogate).
    """
    try:
        # As JSON, because there a list may fill a tuple and "2" an integer key, and yet no
        # number is taken from a text: Python-mode "strict" would refuse the first two.
        text = to_json(data, inf_nan_mode="constants", fallback=_of_numpy)
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        raise SpecError(
            where, got=Words(f"what JSON cannot say ({error})"), expected="a plain document"
        ) from error
    try:
        return model_cls.model_validate_json(text)
    except ValidationError as error:
        if error.error_count() > _MAX_ERRORS:
            _, place, problem, *_ = str(error).split("\n", 3)
            raise SpecError(
                f"{where}: {place}", got=Words(f"{error.error_count()} errors"),
                expected=_expected(problem.strip().partition(" [type=")[0]),
            ) from error  # fmt: skip
        problems = _telling(error.errors(include_url=False))
        problems.sort(key=lambda problem: problem["type"] != "extra_forbidden")
        raise _as_spec_error(model_cls, problems, where) from error


def _of_numpy(value: object) -> object:
    """A number or an array of numpy, as a loop in a notebook hands it, as plain data.

    Raises:
        TypeError: it is neither.
    """
    import numpy as np  # documents are read without it

    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(f"unknown type {type(value).__name__}")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word most like ``word``, or ``None``; for "did you mean"."""
    return next(iter(nearest_few(word, known, 1)), None)


def nearest_few(word: str, known: Iterable[str], count: int) -> list[str]:
    """Return up to ``count`` known words most like ``word``, the nearest first.

    Of what a notebook gave in place of a word, none is like it.
    """
    if not isinstance(word, str):
        return []
    by_lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), by_lower, n=count, cutoff=0.6)
    return [by_lower[lower] for lower in found]


def _as_spec_error(
    model_cls: type[BaseModel], problems: Sequence[ErrorDetails], where: str
) -> SpecError:
    problem = problems[0]
    location = problem["loc"]
    path = _dotted(location)
    got: object = problem["input"]
    fix: str | None = None
    if problem["type"] == "extra_forbidden":
        known = sorted(_fields_at(model_cls, location[:-1]))
        guess = nearest(str(location[-1]), known)
        expected = "no such field"
        if guess is not None:
            fix = f"did you mean {guess!r}?"
        elif known:
            expected = "one of the fields " + ", ".join(known)
    elif problem["type"] == "missing":
        # All that one record lacks, so that nobody learns of them one by one.
        beside = [p for p in problems if p["type"] == "missing" and p["loc"][:-1] == location[:-1]]
        names = [str(p["loc"][-1]) for p in beside[:_MAX_NAMES]]
        path = _dotted([*location[:-1], ", ".join(names)])
        got, expected = Words("nothing"), "a value" + (" of each" if len(names) > 1 else "")
        problems = [problem, *(p for p in problems if p not in beside[: len(names)])]
    else:
        expected = _expected(problem["msg"])
        if isinstance(got, Mapping) and len(repr(got)) > _MOST_SHOWN:
            got = Words("fields that do not go together")
    if len(problems) > 1:
        more = f"{len(problems) - 1} more error{'s' if len(problems) > 2 else ''} in this document"
        fix = more if fix is None else f"{fix} ({more})"
    return SpecError(f"{where}: {path}" if path else where, got=got, expected=expected, fix=fix)


def _telling(problems: list[ErrorDetails]) -> list[ErrorDetails]:
    """Leave out lists "too short" only because an item of theirs is wrong."""
    places = [problem["loc"] for problem in problems]
    return [
        problem
        for problem in problems
        if problem["type"] != "too_short"
        or not any(
            len(at) > len(problem["loc"]) and at[: len(problem["loc"])] == problem["loc"]
            for at in places
        )
    ]


def _dotted(location: Sequence[int | str]) -> str:
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


_PLAIN_WORDS = {
    "a valid array": "a list",
    "an object": "a mapping of fields",
    "a valid string": "a text",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
}


def _expected(message: str) -> str:
    """Turn pydantic's sentence into what stands after "expected"."""
    for prefix in ("Value error, ", "Assertion failed, ", "Input should be ", "Input should "):
        message = message.removeprefix(prefix)
    message = re.sub(r"^String should match pattern '(.*)'$", r"a text that matches \1", message)
    message = re.sub(r"^\w+ should have (.*?)(?: after validation)?, not \d+$", r"\1", message)
    return _PLAIN_WORDS.get(message, message)


def _fields_at(annotation: object, location: Sequence[int | str]) -> set[str]:
    """Names of the fields that the model at ``location`` inside ``annotation`` takes."""
    models = list(_models_in(annotation))
    if not location:
        return {name for model in models for name in _field_names(model)}
    head, rest = location[0], location[1:]
    inner: set[str] = set()
    for model in models:
        for name, field in model.model_fields.items():
            if head in (name, field.alias):
                # The items of lists and mappings, and the branches of unions, add parts to the
                # location that name no field: skip parts until one fits.
                for skip in range(len(rest) + 1):
                    inner |= _fields_at(field.annotation, rest[skip:])
                    if inner:
                        break
    return inner


def _field_names(model: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


def _models_in(annotation: object) -> Iterable[type[BaseModel]]:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        if issubclass(annotation, BaseModel):
            yield annotation
        return
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)
