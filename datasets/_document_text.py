"""The text of documents: JSON and YAML 1.2 to plain data and back, within limits.

Only plain data is built. What a stranger's document may cost is bounded before it is built.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Hashable, Mapping
from typing import Any, NoReturn

import yaml

from foreplan.errors import SpecError

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is ten times faster
_MAX_DEPTH = 100  # of nested brackets; specs need five
#: Longest documents that are read; parsed, the worst of this length take half a GB (measured).
MAX_JSON_BYTES, MAX_YAML_BYTES = 16 << 20, 1 << 20
_MAX_DIGITS = 400  # of a whole number; a float has 309 at most
#: Most values of a document; YAML's aliases (``*name``) of aliases multiply.
_MAX_VALUES = 1_000_000
_MERGE = "tag:yaml.org,2002:merge"


class Words(str):
    """Words about a value, shown without the quotes that a value from the file would have."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


# ---------------------------------------------------------------------------------- validation


def refuse_large(document: object, where: str) -> None:
    """Refuse what would take others memory or depth; goes through the document by levels."""
    level: list[Any] = [document] if isinstance(document, dict | list) else []
    count = 0
    for _ in range(_MAX_DEPTH):
        inside: list[Any] = []
        for item in level:
            count += len(item) if isinstance(item, dict | list) else 0
            if count > _MAX_VALUES:
                raise SpecError(
                    where, got=Words(f"more than {_MAX_VALUES} values"),
                    expected="a smaller document",
                )  # fmt: skip
            values = item.values() if isinstance(item, dict) else item
            inside += (v for v in values if isinstance(v, dict | list))
        if not inside:
            return
        level = inside
    raise RecursionError


def write_yaml(data: Mapping[str, Any]) -> str:
    """Plain data as YAML; same data, same bytes."""
    text = yaml.dump(
        data,
        Dumper=_DocumentDumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=False,
        width=96,
    )
    return str(text)


def parse_json(text: str, where: str) -> object:
    """Plain data; `SpecError` with the line, for a key given twice too."""
    if not text.strip():
        return None

    def refuse(constant: str) -> NoReturn:
        raise SpecError(where, got=Words(constant), expected="finite numbers")

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        mapping = dict(pairs)
        if len(mapping) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise _Duplicate(twice)
        return mapping

    def integer(digits: str) -> int:
        if len(digits) > _MAX_DIGITS:
            raise SpecError(where, got=Words(f"{digits[:20]}..."), expected="shorter numbers")
        return int(digits)

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse, parse_int=integer)
    except json.JSONDecodeError as error:
        raise SpecError(
            f"{where}: line {error.lineno}",
            got=Words(f"a syntax error ({error.msg}, column {error.colno})"),
            expected="JSON",
        ) from error
    except _Duplicate as error:
        if len(text) <= MAX_YAML_BYTES:
            parse_yaml(text, where)  # knows the line, and JSON is YAML but for some tabs
        raise SpecError(
            where, got=Words(f"the key {error.key!r} twice"), expected="each key once"
        ) from error


class _Duplicate(Exception):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


class _DocumentLoader(_Loader):  # type: ignore[misc]  # one of two bases, chosen at import
    """PyYAML's safe loader with the scalars of YAML 1.2 and keys checked for repetition.

    Merge keys (``<<: *like``), which devices of a kind are written with, are read as YAML 1.1 does.
    """

    yaml_implicit_resolvers: typing.ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:  # whose fields give way to the mapping's own
                continue
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
    ("merge", "<<", ["<"]),
):
    for _class in (_DocumentLoader, _DocumentDumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first
        )
_DocumentLoader.add_constructor("tag:yaml.org,2002:int", _integer)
_DocumentLoader.add_constructor("tag:yaml.org,2002:float", _floating)
_DocumentLoader.add_constructor(_MERGE, _Loader.construct_yaml_str)  # no key, but a value


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


def parse_yaml(text: str, where: str) -> object:
    """Plain data; `SpecError` with the line, for a key given twice too."""
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
        problem = error.problem or error.context
        twice = isinstance(error, yaml.constructor.ConstructorError)  # what we say ourselves
        got = problem if twice and problem else f"a syntax error ({problem or 'no reason given'})"
        raise SpecError(place, got=Words(got), expected="YAML, each key once") from error
    except yaml.reader.ReaderError as error:
        raise SpecError(
            where, got=Words(f"bytes that no text has ({error.reason}, at {error.position})"),
            expected="YAML",
        ) from error  # fmt: skip
    except (yaml.YAMLError, ValueError) as error:
        raise SpecError(where, got=Words(error), expected="YAML") from error
