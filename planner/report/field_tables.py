"""What a plan's workload may say: fields, defaults and meanings, for the terminal."""

from __future__ import annotations

import inspect
import re
from typing import Any

from pydantic import BaseModel

from foreplan.planner.report._grid import Column, Grid
from foreplan.planner.report.text import plain

#: ``    name, other: what it means``, and lines below it that are indented further.
_FIELD = re.compile(r"^    (\w+(?:, \w+)*): (.+(?:\n {5,}.+)*)", re.MULTILINE)


def workload_fields(workload: type[BaseModel]) -> list[dict[str, Any]]:
    """Each field: ``name``, ``required``, ``default``, and ``meaning`` from the docstring."""
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
        }
        for name, field in workload.model_fields.items()
    ]


def _shown(value: Any) -> Any:
    """A default as somebody would write it in a document."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_none=True)
    return list(value) if isinstance(value, tuple) else value


def fields_table(kind: str, workload: type[BaseModel]) -> Grid:
    """One row a field; what has to be given comes first."""
    found = sorted(workload_fields(workload), key=lambda field: not field["required"])
    defaults = [
        "needed" if field["required"]
        else "" if field["default"] in (None, "", [], {})
        else str(field["default"]).strip("[]")
        for field in found
    ]  # fmt: skip
    return Grid(
        f"Fields of a {plain(kind)} workload, for --workload",
        [
            Column("field", [field["name"] for field in found]),
            Column("default", defaults),
            Column("meaning", [field["meaning"].replace("`", "") for field in found]),
        ],
    )
