"""Tables of prediction errors and data sets for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table


def error_table(result: Mapping[str, Any]) -> Table:
    """Errors by device and operator, from `cost_models.evaluation.evaluate`'s document."""
    table = Table(title=f"{result['overall']['count']} rows, {result['unsupported']} unsupported")
    for name in ("device", "operator", "rows", "MAPE", "median", "90th pct.", "within 10 %"):
        table.add_column(name, justify="left" if name in ("device", "operator") else "right")
    for device, by_op in result["by_device_op"].items():
        for op, errors in by_op.items():
            table.add_row(device, op, *_cells(errors))
        table.add_row(device, "all", *_cells(result["by_device"][device]), end_section=True)
    table.add_row("all", "all", *_cells(result["overall"]))
    return table


def stats_table(result: Mapping[str, Any]) -> Table:
    """Rows by device and operator, from `cost_models.commands.operator_stats`."""
    table = Table(title=f"{result['rows']} rows")
    for name in ("device", "chip", "operator", "rows"):
        table.add_column(name, justify="right" if name == "rows" else "left")
    for device, by_op in result["by_device_op"].items():
        for op, count in by_op.items():
            table.add_row(device, result["chips"][device], op, f"{count:,}")
    return table


def _cells(errors: Mapping[str, Any]) -> list[str]:
    shares = ("mape", "median_ape", "p90_ape", "within_10pct")
    if not errors["count"]:
        return ["0", *("-" for _ in shares)]
    return [f"{errors['count']:,}", *(f"{100 * errors[name]:.1f} %" for name in shares)]
