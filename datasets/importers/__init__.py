"""Importers of public latency data: each reads one source's files into an `OperatorTable`.

A format covers a source's own CSV or Parquet and the files derived from it. What a profiler saw
(``kernel_name``, ``kernel_source``) is never read: at prediction time nobody knows it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType

from foreplan.datasets.device import Device
from foreplan.datasets.importers import aiconfigurator, foreplan_table, helix, neusight
from foreplan.datasets.importers._columns import Columns, read_columns
from foreplan.datasets.specs import nearest
from foreplan.datasets.sweeps.operator_table import OperatorTable
from foreplan.errors import SpecError

__all__ = ["FORMATS", "read_operators"]

#: Format name to the function that turns its columns into a table.
FORMATS: Mapping[str, Callable[[Columns], OperatorTable]] = MappingProxyType(
    {
        "foreplan": foreplan_table.convert,
        "neusight": neusight.convert,
        "aiconfigurator": aiconfigurator.convert,
        "helix": helix.convert,
    }
)


def read_operators(
    path: str | os.PathLike[str],
    format_name: str,
    *,
    device: str | None = None,
    devices: Mapping[str, Device] | None = None,
) -> OperatorTable:
    """Read a file of measured operators.

    Args:
        path: CSV (optionally ``.gz`` or ``.xz``) or Parquet.
        format_name: one of `FORMATS`.
        device: what rows ran on that do not say, and every row of Helix's upstream CSV.
        devices: figures of devices that the zoo lacks, by the name the file uses.

    Raises:
        SpecError: no such format; the file cannot be read, lacks a column, or has no row; a size
            or a latency that is not a positive number; a row that says no device, without
            ``device``.
    """
    if format_name not in FORMATS:
        guess = nearest(format_name, FORMATS)
        raise SpecError(
            "--format", got=format_name, expected="one of " + ", ".join(FORMATS),
            fix=f"did you mean {guess}?" if guess
            else "tir-jsonl is of programs: evaluate, train and dataset stats take it",
        )  # fmt: skip
    columns = read_columns(path, device=device, header=format_name != "helix")
    table = FORMATS[format_name](columns)
    if not devices:
        return table
    from dataclasses import replace

    return replace(table, devices={**table.devices, **devices})
