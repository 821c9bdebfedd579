"""Tables of prediction errors and data sets for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType

from foreplan.planner.report._grid import Column, Grid, bullets, heading
from foreplan.planner.report.text import UNKNOWN, percent


def error_table(result: Mapping[str, Any]) -> RenderableType:
    """Errors by device and operator, from `cost_models.evaluation.evaluate`'s document."""
    rows: list[tuple[str, str, Mapping[str, Any]]] = []
    for device, by_op in result["by_device_op"].items():
        rows += [(device, op, errors) for op, errors in by_op.items()]
        rows.append((device, "all", result["by_device"][device]))
    rows.append(("all", "all", result["overall"]))
    # Once for its rows: long names of devices would break into lines on each.
    before = [None, *(device for device, _, _ in rows)]
    shown = ["" if row[0] == last else row[0] for row, last in zip(rows, before, strict=False)]

    def column(title: str, key: str, least: int = 0) -> Column:
        cells = [percent(e[key]) if e["count"] else UNKNOWN for _, _, e in rows]
        return Column(title, cells, True, least)

    grid = Grid(
        f"{result['overall']['count']} rows predicted, {result['unsupported']} not",
        [
            Column("device", shown),
            Column("operator", [op for _, op, _ in rows]),
            Column("rows", [f"{errors['count']:,}" for _, _, errors in rows], True),
            column("MAPE", "mape"),
            column("median", "median_ape"),
            column("90th pct.", "p90_ape", 80),
            column("within 10 %", "within_10pct", 70),
        ],
    )
    reasons = result.get("unsupported_why") or result.get("unsupported_reasons", {})  # of programs
    why = [f"{text} ({count:,})" for text, count in reasons.items()]
    taught = result.get("taught", {})  # of operators
    parts: list[RenderableType] = [grid]
    if taught:
        parts += bullets(
            [
                f"{sum(taught.values()):,} rows are of chips, libraries and data types that the "
                f"model was trained on ({', '.join(taught)}): their error is no test"
            ]
        )
    if why:
        parts += [heading("Not predicted"), *bullets(why)]
    return Group(*parts) if len(parts) > 1 else grid


def stats_table(result: Mapping[str, Any]) -> RenderableType:
    """Rows by device and operator, from `cost_models.commands.operator_stats`."""
    rows = [
        (device, result["chips"][device], op, count)
        for device, by_op in result["by_device_op"].items()
        for op, count in by_op.items()
    ]
    failed = sum(result.get("failed", {}).values())  # of programs
    title = f"{result['rows']} rows" + (f", {failed} failed" if failed else "")
    if not rows:
        return heading(title)
    lacking = result.get("not_in_zoo", [])  # of operators
    told = bullets([f"not in the zoo: {name}; evaluate takes --device-file" for name in lacking])
    grid = Grid(
        title,
        [
            Column("device", [device for device, _, _, _ in rows]),
            Column("chip", [chip for _, chip, _, _ in rows]),
            Column("operator", [op for _, _, op, _ in rows]),
            Column("rows", [f"{count:,}" for _, _, _, count in rows], True),
        ],
    )
    return Group(grid, *told) if lacking else grid


def left_out(card: Mapping[str, Any]) -> str:
    """What ``train`` did not fit to, in words, from its card; empty where it took all."""
    counts = card.get("left_out", {})
    reasons = {
        "noisy": "whose repetitions spread too far (others used the machine)",
        "unsupported": "that cannot be read",
    }
    told = [f"{counts[name]:,} programs {why}" for name, why in reasons.items() if counts.get(name)]
    return f"left out: {', and '.join(told)}" if told else ""


def tuning_table(card: Mapping[str, Any]) -> RenderableType:
    """Errors before and after fine-tuning, from the card that ``train --start`` wrote."""
    if "tuning" in card:
        t = card["tuning"]
        rows = [("scheduled programs", t["programs"], t["mape_before"], t["mape_unseen"])]
    else:
        found = [(t, kind, of) for t in card["tunings"] for kind, of in t["kinds"].items()]
        names = [f"{t['device']['name']} {kind} {t['dtype']}" for t, kind, _ in found]
        rows = [
            (name if names.count(name) == 1 else f"{name} {t['library']}", of["rows"],
             of["mape_before"], of["mape_unseen"])
            for name, (t, _, of) in zip(names, found, strict=True)
        ]  # fmt: skip
    return Grid(
        "Error on the rows given; after: by a fit on the others",
        [
            Column("of", [name for name, _, _, _ in rows]),
            Column("rows", [f"{count:,}" for _, count, _, _ in rows], True),
            Column("before", [percent(before) for _, _, before, _ in rows], True),
            Column("after", [UNKNOWN if a is None else percent(a) for _, _, _, a in rows], True),
        ],
    )
