"""Specs: the base of every description read from a file, and how one is read and checked.

A spec is a YAML or JSON document checked by a `StrictModel`. Whatever is wrong with it becomes
one `SpecError` line: file, field, what stands there, what should.

YAML is read as version 1.2 has it, not 1.1: ``1e9`` is a number, ``no`` and ``2024-01-01`` are
texts, ``010`` is ten. A JSON file means the same when read as YAML.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import types
import typing
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticSerializationError, to_json

from foreplan.errors import SpecError

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is ten times faster
_MAX_DEPTH = 100  # of nested brackets; specs need five
#: Longest documents that are read; parsed, the worst of this length take half a GB (measured).
_MAX_JSON_BYTES, _MAX_YAML_BYTES = 16 << 20, 1 << 20
_MAX_DIGITS = 400  # of a whole number; a float has 309 at most
#: Most values of a document; YAML's aliases (``*name``) of aliases multiply.
_MAX_VALUES = 1_000_000
#: More errors than these are not listed one by one: a kilobyte each.
_MAX_ERRORS = 10_000


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

    Only plain data is built: a YAML tag that would construct an object is an error.

    Args:
        path: the file, in UTF-8.

    Returns:
        The document, unchecked; see `validate`.

    Raises:
        SpecError: no such file, not UTF-8, empty, too long, a syntax error (with its line), a key
            given twice (with its line), NaN or infinity in JSON, or a top that is not a mapping.
    """
    where = os.fspath(path)
    json_text = where.lower().endswith(".json")
    longest = _MAX_JSON_BYTES if json_text else _MAX_YAML_BYTES
    try:
        with Path(path).open("rb") as stream:
            data = stream.read(longest + 1)  # a file may have no end: /dev/zero
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        got = getattr(error, "strerror", None) or str(error)
        raise SpecError(where, got=got, expected="a readable file") from error
    if len(data) > longest:
        raise SpecError(
            where, got=_Words(f"more than {longest} bytes"),
            expected=f"at most {_MAX_YAML_BYTES} bytes of YAML or {_MAX_JSON_BYTES} of JSON",
        )  # fmt: skip
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(
            where, got=f"bytes that are not UTF-8 (at byte {error.start})", expected="a text file"
        ) from error
    parse = _parse_json if json_text else _parse_yaml
    try:
        document = parse(text, where)
        _refuse_large(document, where)
    except RecursionError as error:
        raise SpecError(
            where, got="brackets nested too deeply", expected="a plain document"
        ) from error
    if document is None:
        raise SpecError(where, got=_Words("nothing"), expected="a document with fields")
    if not isinstance(document, dict):
        raise SpecError(
            where, got=document, expected="a mapping of fields at the top of the document"
        )
    return document


def _refuse_large(document: object, where: str) -> None:
    """Refuse what would take others memory or depth; goes through the document by levels."""
    level: list[Any] = [document] if isinstance(document, dict | list) else []
    count = 0
    for _ in range(_MAX_DEPTH):
        inside: list[Any] = []
        for item in level:
            count += len(item) if isinstance(item, dict | list) else 0
            if count > _MAX_VALUES:
                raise SpecError(
                    where, got=_Words(f"more than {_MAX_VALUES} values"),
                    expected="a smaller document",
                )  # fmt: skip
            values = item.values() if isinstance(item, dict) else item
            inside += (v for v in values if isinstance(v, dict | list))
        if not inside:
            return
        level = inside
    raise RecursionError


def dump_document(data: Mapping[str, Any]) -> str:
    """Write plain data as YAML that `load_document` reads back equal; same data, same bytes."""
    text = yaml.dump(
        data,
        Dumper=_DocumentDumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=False,
        width=96,
    )
    return str(text)


def validate(model_cls: type[Model], data: object, where: str) -> Model:
    """Check plain data against a model.

    Args:
        model_cls: what the data should be.
        data: mappings, lists, texts, numbers (what `load_document` or ``json`` returns).
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
        text = to_json(data, inf_nan_mode="constants")
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        raise SpecError(
            where, got=_Words(f"what JSON cannot say ({error})"), expected="a plain document"
        ) from error
    try:
        return model_cls.model_validate_json(text)
    except ValidationError as error:
        if error.error_count() > _MAX_ERRORS:
            _, place, problem, *_ = str(error).split("\n", 3)
            raise SpecError(
                f"{where}: {place}", got=_Words(f"{error.error_count()} errors"),
                expected=_expected(problem.strip().partition(" [type=")[0]),
            ) from error  # fmt: skip
        problems = _telling(error.errors(include_url=False))
        problems.sort(key=lambda problem: problem["type"] != "extra_forbidden")
        raise _as_spec_error(model_cls, problems, where) from error


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word most like ``word``, or ``None``; for "did you mean"."""
    by_lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


class _Words(str):
    """Words about a value, shown without the quotes that a value from the file would have."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


# ---------------------------------------------------------------------------------- validation


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
        got, expected = _Words("nothing"), "a value"
    else:
        expected = _expected(problem["msg"])
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


# ------------------------------------------------------------------------------------- parsing


def _parse_json(text: str, where: str) -> object:
    if not text.strip():
        return None

    def refuse(constant: str) -> NoReturn:
        raise SpecError(where, got=_Words(constant), expected="finite numbers")

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        mapping = dict(pairs)
        if len(mapping) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise _Duplicate(twice)
        return mapping

    def integer(digits: str) -> int:
        if len(digits) > _MAX_DIGITS:
            raise SpecError(where, got=_Words(f"{digits[:20]}..."), expected="shorter numbers")
        return int(digits)

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse, parse_int=integer)
    except json.JSONDecodeError as error:
        raise SpecError(
            f"{where}: line {error.lineno}",
            got=_Words(f"a syntax error ({error.msg}, column {error.colno})"),
            expected="JSON",
        ) from error
    except _Duplicate as error:
        if len(text) <= _MAX_YAML_BYTES:
            _parse_yaml(text, where)  # knows the line, and JSON is YAML but for some tabs
        raise SpecError(
            where, got=_Words(f"the key {error.key!r} twice"), expected="each key once"
        ) from error


class _Duplicate(Exception):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


class _DocumentLoader(_Loader):  # type: ignore[misc]  # one of two bases, chosen at import
    """PyYAML's safe loader with the scalars of YAML 1.2 and keys checked for repetition."""

    yaml_implicit_resolvers: typing.ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(
                    None, None, "a list or mapping as a key", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} twice", key_node.start_mark
                )
            seen.add(key)
        result: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return result


class _DocumentDumper(yaml.SafeDumper):
    """Quotes what YAML 1.1 or 1.2 would take for something else than a text; no anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML folds a line at these characters without quoting them, and so loses them.
    style = '"' if re.search("[\x85\u2028\u2029]", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_DocumentDumper.add_representer(str, _text)


def _integer(loader: Any, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    if len(text) > _MAX_DIGITS:
        raise yaml.constructor.ConstructorError(None, None, "a longer number", node.start_mark)
    return int(text, 0) if text.lstrip("+-")[:2] in ("0x", "0o") else int(text)


def _floating(loader: Any, node: yaml.ScalarNode) -> float:
    text = loader.construct_scalar(node).lower().replace(".inf", "inf").replace(".nan", "nan")
    return float(text)


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)"
        r"|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    for _class in (_DocumentLoader, _DocumentDumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first
        )
_DocumentLoader.add_constructor("tag:yaml.org,2002:int", _integer)
_DocumentLoader.add_constructor("tag:yaml.org,2002:float", _floating)


def _refuse_size(text: str) -> None:
    """Raise before libyaml, which recurses in C, ends the process, or aliases fill the memory."""
    sizes: dict[str, int] = {}  # values that an anchor stands for
    inside: list[tuple[str | None, int]] = []  # open collections: anchor, values before them
    values = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = inside.pop()
            if anchor is not None:
                sizes[anchor] = values - before
        elif isinstance(event, yaml.NodeEvent):
            # An alias of what is still open has no size yet and would have no end.
            name = event.anchor or ""
            values += sizes.get(name, _MAX_VALUES) if _is_alias(event) else 1
            if isinstance(event, yaml.CollectionStartEvent):
                inside.append((event.anchor, values - 1))
            elif event.anchor is not None and not _is_alias(event):
                sizes[event.anchor] = 1
        if len(inside) > _MAX_DEPTH:
            raise RecursionError
        if values > _MAX_VALUES:
            raise yaml.YAMLError(
                f"more than {_MAX_VALUES} values, or an alias inside what it names"
            )


def _is_alias(event: object) -> bool:
    return isinstance(event, yaml.AliasEvent)


def _parse_yaml(text: str, where: str) -> object:
    try:
        _refuse_size(text)
        # A subclass of SafeLoader: builds plain data only, so this is no arbitrary yaml.load.
        loader = _DocumentLoader(text)
        try:
            return typing.cast(object, loader.get_single_data())
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = where if mark is None else f"{where}: line {mark.line + 1}"
        got = error.problem or error.context or "a syntax error"
        raise SpecError(place, got=_Words(got), expected="YAML, each key once") from error
    except (yaml.YAMLError, ValueError) as error:
        raise SpecError(where, got=_Words(error), expected="YAML") from error
