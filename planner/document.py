"""How plans and verifications are written and read: one JSON form, one check of the schema."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from foreplan.datasets.specs import StrictModel, load_document
from foreplan.errors import SpecError


def document_json(record: StrictModel) -> str:
    """A record as JSON, keys in the fields' order, ``times`` last, with a final newline."""
    data = record.model_dump(mode="json", by_alias=True)
    times = data.pop("times")
    text = json.dumps(data, indent=2, allow_nan=False)
    # Thousands of numbers, one a line, would bury the rest of the document.
    return text[:-2] + f',\n  "times": {json.dumps(times)}\n}}\n'


def read_document(path: str | os.PathLike[str], schema: str, again: str) -> dict[str, Any]:
    """Read a document of a schema, its fields unchecked.

    Args:
        path: the file.
        schema: what it must say of itself, ``NAME/VERSION``.
        again: the command that makes it anew, for the error.

    Raises:
        SpecError: no such file, no document, another schema or version.
    """
    document = load_document(path)
    got = document.get("schema")
    if got != schema:
        name, _, known = schema.rpartition("/")
        version = got.removeprefix(f"{name}/") if isinstance(got, str) else ""
        fix = f"{again} again" if version.isdecimal() else None
        if fix is not None and int(version) > int(known):
            fix = f"use a newer foreplan, or {fix}"
        raise SpecError(f"{Path(path).name}: schema", got=got, expected=schema, fix=fix)
    return document
