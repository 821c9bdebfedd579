"""write_table and read_table: a `ProgramTable` as one file, so that programs are encoded once.

A NumPy archive (zip, no pickles) with the table's arrays by name, its devices as JSON text, and
what made its leaves.
"""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import fields
from pathlib import Path

import numpy as np

from foreplan.cost_models.programs.program_table import ProgramTable
from foreplan.datasets.device import Device
from foreplan.datasets.specs import validate
from foreplan.datasets.storage import write_atomically
from foreplan.errors import SpecError

SCHEMA = "foreplan.programs/1"
_ARRAYS = [field.name for field in fields(ProgramTable) if field.name != "devices"]


def write_table(table: ProgramTable, path: Path, encoder: str) -> None:
    """Write a table whole or not at all.

    Args:
        table: programs.
        path: file.
        encoder: what made its leaves, in a word.

    Raises:
        SpecError: the path cannot be written.
    """
    document = {
        "schema": SCHEMA, "encoder": encoder,
        "devices": [json.loads(device.model_dump_json()) for device in table.devices],
    }  # fmt: skip
    content = io.BytesIO()
    arrays = {name: getattr(table, name) for name in _ARRAYS}
    np.savez_compressed(content, document=np.array(json.dumps(document)), **arrays)
    write_atomically(path, content.getvalue())


def read_table(path: Path, encoder: str) -> ProgramTable:
    """Read what `write_table` wrote.

    Args:
        path: file.
        encoder: what must have made its leaves.

    Raises:
        SpecError: no such file, another kind of file, or leaves of another encoder.
    """
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as found:
            document = json.loads(str(found["document"]))
            arrays = {name: found[name] for name in _ARRAYS}
        made = (document["schema"], document["encoder"])
        devices = document["devices"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise SpecError(
            str(path), got=type(error).__name__, expected="a file of programs that foreplan wrote"
        ) from error
    if made != (SCHEMA, encoder):
        raise SpecError(str(path), got=" ".join(map(str, made)), expected=f"{SCHEMA} {encoder}")
    return ProgramTable(
        devices=tuple(validate(Device, device, f"{path}: device") for device in devices), **arrays
    )
