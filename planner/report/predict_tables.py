"""Tables of predicted latencies for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.table import Table


def predict_tables(result: Mapping[str, Any]) -> Group:
    """Ranking of the devices, and for a single one where its time goes."""
    shape = f"{result['batch']} x {result['sequence_length']} tokens, {result['phase']}"
    ranking = Table(title=f"{result['model']}, {shape}; costs: {result['costs']}")
    for name in ("device", "latency", "low", "high", "limit", "roofline share", "fits"):
        ranking.add_column(name, justify="left" if name in ("device", "limit") else "right")
    for row in result["devices"]:
        bare = row["by_source_s"].get("roofline", 0.0) / max(row["device_s"], 1e-30)
        fits = {True: "yes", False: "no", None: "?"}[row["fits"]]
        ranking.add_row(
            row["device"], *(_ms(row[key]) for key in ("latency_s", "low_s", "high_s")),
            row["limit"], f"{100 * bare:.0f} %", fits,
        )  # fmt: skip
    parts: list[Table | str] = [ranking]
    if len(result["devices"]) == 1:
        only = result["devices"][0]
        where = Table(title=f"device time on {only['device']}, by kind of operator")
        for name in ("kind", "time", "share"):
            where.add_column(name, justify="left" if name == "kind" else "right")
        for kind, seconds in only["by_kind_s"].items():
            where.add_row(kind, _ms(seconds), f"{100 * seconds / only['device_s']:.1f} %")
        parts.append(where)
        if only["unsupported"]:
            names = ", ".join(f"{u['operator']} x{u['count']}" for u in only["unsupported"][:6])
            parts.append(f"priced by the roofline alone: {names}")
    if result["unpriced"]:
        parts.append("no price for " + ", ".join(result["unpriced"]))
    return Group(*parts)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms"
