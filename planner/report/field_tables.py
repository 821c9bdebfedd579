"""What a plan's workload may say: fields, defaults and meanings, for the terminal."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from rich.console import Group

from foreplan.planner.report._grid import Column, Grid
from foreplan.planner.report.text import plain

#: ``    name, other: what it means``, and lines below it that are indented further.
_FIELD = re.compile(r"^    (\w+(?:, \w+)*): (.+(?:\n {5,}.+)*)", re.MULTILINE)


def workload_fields(workload: type[BaseModel]) -> list[dict[str, Any]]:
    """Each field: ``name``, ``required``, ``default``, and ``meaning`` from the docstring.

    Of a record, or a list of records, also its ``fields``.
    """
    meaning: dict[str, str] = {}
    for base in reversed(workload.__mro__):
        _, _, attributes = (inspect.cleandoc(base.__doc__ or "")).partition("Attributes:\n")
        for names, text in _FIELD.findall(attributes):
            meaning.update(dict.fromkeys(names.split(", "), " ".join(text.split())))
    return [
        {
            "name": name,
            "required": field.is_required(),
            "default": None
            if field.is_required()
            else _shown(field.get_default(call_default_factory=True)),
            "meaning": meaning.get(name, ""),
            **_inner(field.annotation),
        }
        for name, field in workload.model_fields.items()
    ]


def _inner(annotation: Any) -> dict[str, Any]:
    """``fields`` of the record that a field's type has in it, if it has one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {"fields": workload_fields(annotation)}
    return next(filter(None, map(_inner, get_args(annotation))), {})


def _shown(value: Any) -> Any:
    """A default as somebody would write it in a document."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_none=True)
    return list(value) if isinstance(value, tuple) else value


def fields_table(kind: str, workload: type[BaseModel]) -> Group:
    """One row a field, what has to be given first; a table for each record that a field holds."""
    fields = workload_fields(workload)
    inner: dict[str, tuple[list[str], list[dict[str, Any]]]] = {}
    for path, found in _inside(fields):  # equal records of several fields once
        inner.setdefault(str(found), ([], found))[0].append(path)
    return Group(
        _table(f"Fields of a {plain(kind)} workload, for --workload", fields),
        *(_table(f"Fields of {', '.join(paths)}", found) for paths, found in inner.values()),
    )


def _inside(fields: list[dict[str, Any]], where: str = "") -> Iterator[tuple[str, Any]]:
    for field in fields:
        if "fields" in field:
            path = f"{where}{field['name']}"
            yield path, field["fields"]
            yield from _inside(field["fields"], f"{path}.")


def _table(title: str, fields: list[dict[str, Any]]) -> Grid:
    found = sorted(fields, key=lambda field: not field["required"])
    defaults = [
        "needed" if field["required"]
        else "" if field["default"] in (None, "", [], {})
        else str(field["default"]).strip("[]")
        for field in found
    ]  # fmt: skip
    return Grid(
        title,
        [
            Column("field", [field["name"] for field in found]),
            Column("default", defaults),
            Column("meaning", [field["meaning"].replace("`", "") for field in found]),
        ],
    )
