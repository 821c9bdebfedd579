"""`load_workload`: what is asked of a plan, from a file, ``FIELD=VALUE,...`` or Python."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foreplan.datasets.specs import StrictModel, load_document, validate
from foreplan.errors import SpecError
from foreplan.planner.registry import planner as find_planner

#: How `_inline` reads a list.
_LISTED = "items of a list go apart by +, as in bits=16+8"
_APART = "fields go apart by commas, as in batch=4,prompt_tokens=64"


def load_workload(
    kind: str, source: str | Path | Mapping[str, Any] | StrictModel | None
) -> StrictModel:
    """A planner's workload from a file, ``batch=8,prompt_tokens=64``, a mapping, or as it is.

    Raises:
        SpecError: an unknown kind, field or value.
    """
    chosen = find_planner(kind)
    model = chosen.workload_type
    if isinstance(source, StrictModel):
        if not isinstance(source, model):
            raise SpecError("workload", got=type(source).__name__, expected=model.__name__)
        return source
    if source is None:
        return validate(model, {}, f"{kind} workload")
    if isinstance(source, Mapping):
        return validate(model, chosen.completed(source), "workload")
    if not isinstance(source, (str, Path)):  # from a notebook, which no type checker has seen
        raise SpecError(
            "workload", got=source, expected="fields by name, FIELD=VALUE,... or a file"
        )
    text = str(source)
    if not text.strip():  # the path of no file, and of the current folder
        raise SpecError("--workload", got="", expected="FIELD=VALUE,... or a file")
    if "=" in text and not os.path.exists(text):  # a long text is no name of a file
        try:
            return validate(model, chosen.completed(_inline(text)), "--workload")
        except SpecError as error:
            fix = _LISTED if error.expected == "a list" else _APART if ";" in text else None
            if fix is None:
                raise
            raise SpecError(error.where, got=error.got, expected=error.expected, fix=fix) from error
    return validate(model, chosen.completed(load_document(text)), Path(text).name)


def _inline(text: str) -> dict[str, Any]:
    """``a=1,b=2.5,bits=16+8``: fields apart by commas, items of a list by ``+``."""
    fields: dict[str, Any] = {}
    for item in text.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key:
            raise SpecError(
                "--workload", got=text, expected="FIELD=VALUE,... or a file",
                fix=_LISTED,
            )  # fmt: skip
        if key in fields:
            raise SpecError("--workload", got=f"{key} twice", expected="each field once")
        words = [_scalar(word) for word in value.split("+")]
        fields[key] = words if len(words) > 1 else words[0]
    return fields


def _scalar(word: str) -> Any:
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for read in (int, float):
        try:
            return read(word)
        except ValueError:
            continue
    return word
