"""`zoo_entries`: one of the package's lists of known models or encoders, read once."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from foreplan.datasets.specs import load_document
from foreplan.errors import SpecError


@cache  # the files are part of the package and do not change
def zoo_entries(file: Path, schema: str, key: str) -> dict[str, dict[str, Any]]:
    """Entries by name.

    Args:
        file: YAML beside the code.
        schema: what its ``schema`` has to say.
        key: field that holds the entries.

    Raises:
        SpecError: another schema.
    """
    document = load_document(file)
    if document.get("schema") != schema:
        raise SpecError(f"{file}: schema", got=document.get("schema"), expected=schema)
    entries: dict[str, dict[str, Any]] = document[key]
    return entries
