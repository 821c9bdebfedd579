"""Tables of predicted latencies for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from foreplan.cost_models.roofline import FACTOR, instead_of_bf16
from foreplan.planner.report._grid import Column, Grid, bullets, heading, toned
from foreplan.planner.report.text import percent, plain, seconds

#: Share of a device's time from which its prices are said to be no predictions (assumed).
_MOSTLY = 0.5
#: How a pass ran, said behind its shape.
_EXECUTED = {"eager": "", "graph": " as a CUDA graph", "compiled": " compiled, as a CUDA graph"}


def predict_tables(result: Mapping[str, Any]) -> Group:
    """Ranking of the devices, and for a single one where its time goes."""
    rows = result["devices"]
    shape = f"{plain(result['shape'])}, {result['phase']}"
    shape += _EXECUTED[result["execution"]]
    shape += f", {plain(result['dtype'])}"
    bare = [r["by_source_s"].get("roofline", 0.0) / max(r["device_s"], 1e-30) for r in rows]
    fits = {True: Text("yes"), False: toned("no", "bad"), None: Text("?")}
    parts: list[RenderableType] = [
        Text(f"{plain(result['model'])}, {shape}; costs: {result['costs']}", style="bold"),
        Grid(
            "Latency, fastest first",
            [
                Column("device", [row["device"] for row in rows]),
                Column("latency", [seconds(row["latency_s"]) for row in rows], True),
                Column("low", [seconds(row["low_s"]) for row in rows], True, 70),
                Column("high", [seconds(row["high_s"]) for row in rows], True, 70),
                Column("limit", [row["limit"] for row in rows], False, 66),
                Column("by figures", [percent(share) for share in bare], True),
                Column("fits", [fits[row["fits"]] for row in rows]),
            ],
        ),
    ]
    notes = []
    if max(bare) > _MOSTLY:
        notes.append(
            "by figures: share of the time priced from published figures alone, as "
            f"{FACTOR[1]:g} times what they allow at best; a rank beside predicted devices then "
            "means little"
        )
    for name, board in result["here"].items():
        notes.append(
            f"{plain(name)}: this host ({plain(board)}), a forecast: its figures were read just "
            "now, and no operator was timed; 'foreplan profile', then --profile, does"
        )
    if evaluated := rows[0]["evaluated"]:
        shown = ", ".join(path or "the whole model" for path in evaluated)
        notes.append(f"priced in evaluation mode, as training mode cannot be traced: {shown}")
    if "experts" in rows[0]["by_kind_s"]:
        notes.append(
            "experts: tokens are taken to choose theirs evenly, as routers are trained to; a "
            "router that prefers some reads fewer weights and is faster"
        )
    for dtype in sorted(set(result["bf16_as"].values())):
        names = [plain(name) for name, stands in result["bf16_as"].items() if stands == dtype]
        notes.append(f"no bf16 on {', '.join(names)}: it is {instead_of_bf16(dtype)}")
    unknown = [row for row in rows if row["fits"] is None]
    if any(row["device_kind"] == "cpu" for row in unknown):
        notes.append("fits ?: a processor's memory is its host's, which no figure tells")
    if silent := [plain(row["device"]) for row in unknown if row["device_kind"] != "cpu"]:
        notes.append(
            f"fits ?: figures of {', '.join(silent)} state no memory; a device file has "
            "memory_bytes for it"
        )
    if result["scans"]:
        notes.append(
            "a state goes from token to token: what transformers computes by itself is priced, and "
            "fused kernels of other packages (mamba-ssm, flash-linear-attention) are faster"
        )
    parts += bullets(notes)
    if len(rows) == 1:
        only = rows[0]
        kinds = only["by_kind_s"]
        parts.append(
            Grid(
                f"Device time on {only['device']}, by kind of operator",
                [
                    Column("kind", list(kinds)),
                    Column("time", [seconds(value) for value in kinds.values()], True),
                    Column("share", [percent(v / only["device_s"]) for v in kinds.values()], True),
                ],
            )
        )
        if only["unsupported"]:
            names = [f"{u['operator']} x{u['count']}" for u in only["unsupported"]]
            more = [f"and {len(names) - 6} more"] if len(names) > 6 else []
            parts += [heading("Without a price of their own"), *bullets([*names[:6], *more])]
    if result["unpriced"]:
        parts += [heading("No price"), *bullets(_unpriced(result["unpriced"]))]
    return Group(*parts)


def _unpriced(reasons: Mapping[str, str]) -> list[str]:
    """A line a reason, with the devices that share it."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason.replace(f" on {name}", ""), []).append(plain(name))
    return [f"{', '.join(devices)}: {plain(reason)}" for reason, devices in names.items()]
