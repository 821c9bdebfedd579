"""Tables of what is known without a plan: devices, a profile, a simulated pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from foreplan.datasets.device import Device
from foreplan.datasets.profile import Profile, Row
from foreplan.datasets.quantity import format_bandwidth, format_bytes, format_rate
from foreplan.planner.report._grid import Column, Facts, Grid, heading
from foreplan.planner.report.text import (
    UNKNOWN,
    bytes_of,
    figure,
    number,
    percent,
    plain,
    runs,
    seconds,
    words,
)

_PEAKS = (("bf16", 0, "fp16"), ("fp32", 100, None), ("fp8", 140, None), ("int8", 120, None))


def devices_table(devices: Sequence[Device]) -> RenderableType:
    """The zoo: a row a device, the figures that plans use most."""
    columns = [
        Column("device", [device.name for device in devices]),
        Column("vendor", [device.vendor for device in devices], least=120),
        Column("chip", [device.chip for device in devices], least=160),
        Column("memory", [bytes_of(device.memory_bytes) for device in devices], True),
        Column("bandwidth", [_bandwidth(device.memory_bandwidth) for device in devices], True),
    ]
    for dtype, least, instead in _PEAKS:
        name = f"{dtype} or {instead}" if instead else dtype
        columns.append(Column(name, [_peak(d, dtype, instead) for d in devices], True, least))
    columns += [
        Column("units", [_count(device.units) for device in devices], True, 90),
        Column("power", [_watts(device.tdp_w) for device in devices], True, 160),
    ]
    note = f"{len(devices)} devices; dense peaks. `foreplan devices NAME` shows the sources."
    return Grid("Devices", columns, note)


def device_table(device: Device) -> RenderableType:
    """One device with every figure and where it comes from."""
    facts: list[tuple[str, str | Text]] = [
        ("vendor", plain(device.vendor)),
        ("chip", plain(device.chip)),
        ("kind", device.kind),
        *(
            (words(name), plain(value))
            for name in ("architecture", "compute_capability", "slice", "notes")
            if (value := getattr(device, name))
        ),
    ]
    if device.isa:
        facts.append(("isa", ", ".join(plain(isa) for isa in device.isa)))
    facts += _rereads(device)
    shown = [_figure(name, value) for name, value in device.figures()]
    origin = [plain(device.sources.get(name, UNKNOWN)) for name, _ in device.figures()]
    return Group(
        Text(plain(device.name), style="bold"),
        Facts(facts),
        Grid(
            "Figures",
            [
                Column("figure", [label for label, _ in shown]),
                Column("value", [value for _, value in shown], True),
                Column("source", origin),
            ],
        ),
    )


def pipeline_table(document: Mapping[str, Any]) -> RenderableType:
    """A simulated pipeline step, as ``foreplan simulate pipeline --json`` prints it."""
    peaks = document.get("peak_activations", ())
    facts: list[tuple[str, str | Text]] = [
        ("bubble rate", f"{100 * document['bubble_rate']:.2f} %"),
        ("iteration", seconds(document["iteration_s"])),
        ("makespan", seconds(document["makespan_s"])),
    ]
    held = [number(float(peak)) for peak in peaks]
    if len(held) <= 16:
        stages: RenderableType = Grid(
            "Peak activations, in micro-batches",
            [
                Column("stage", [str(k) for k in range(len(held))], True),
                Column("activations", held, True),
            ],
        )
    else:
        stages = Facts([("peak activations by stage, in micro-batches", runs(held))])
    return Group(Text("Simulated pipeline step", style="bold"), Facts(facts), stages)


def profile_table(profile: Profile) -> RenderableType:
    """What a profile holds: programs by operator, and the device's measured figures."""
    by_op: dict[str, list[Row]] = {}
    for row in profile.rows:
        by_op.setdefault(row.op, []).append(row)
    good = {op: [row for row in rows if row.status == "ok"] for op, rows in by_op.items()}
    facts: list[tuple[str, str | Text]] = [
        ("measured for", seconds(profile.measured_seconds)),
        *((plain(name), plain(version)) for name, version in profile.software.items()),
    ]
    if profile.device.slice:
        facts.insert(0, ("slice of a chip", plain(profile.device.slice)))
    figures = [_figure(name, value) for name, value in profile.device.figures()]
    return Group(
        Text(f"profile of {plain(profile.device.name)}", style="bold"),
        Facts(facts),
        Grid(
            "Programs by operator",
            [
                Column("operator", [plain(op) for op in by_op]),
                Column("measured", [str(len(good[op])) for op in by_op], True),
                Column(
                    "failed", [str(len(rows) - len(good[op])) for op, rows in by_op.items()], True
                ),
                Column(
                    "variants", [str(len({row.variant for row in rows})) for rows in good.values()],
                    True, 70,
                ),
                Column("fastest", [_extreme(rows, min) for rows in good.values()], True, 80),
                Column("slowest", [_extreme(rows, max) for rows in good.values()], True, 80),
                Column("typical spread", [_spread(rows) for rows in good.values()], True),
            ],
            note="spread: 10th to 90th percentile over the median",
        ),
        heading("Device"),
        Facts([*figures, *_rereads(profile.device)]),
    )  # fmt: skip


def _rereads(device: Device) -> list[tuple[str, str]]:
    """How fast caches and memory were seen to be read: where that falls by a third."""
    steps: list[tuple[int, float]] = []
    for size, rate in reversed(device.reread_bandwidth or ()):
        if not steps or rate > 1.5 * steps[-1][1]:
            steps.append((size, rate))
    if not steps:
        return []
    held = [f"{format_bandwidth(rate)} up to {format_bytes(size)}" for size, rate in steps[:0:-1]]
    return [("reads again", ", ".join([*held, f"{format_bandwidth(steps[0][1])} beyond"]))]


def _figure(name: str, value: float) -> tuple[str, str]:
    if name.startswith("peak_flops."):
        return f"peak {plain(name.partition('.')[2])}", format_rate(value)
    if name.endswith("_hz"):
        return words(name.removesuffix("_hz")), f"{value / 1e9:.4g} GHz"
    if name.endswith("_w"):
        return words(name.removesuffix("_w")), _watts(value)
    if name.endswith("_bandwidth"):
        return words(name), format_bandwidth(value)
    if "_bytes" in name and not name.endswith("_bytes"):
        return words(name.replace("_bytes", "")), bytes_of(value)
    return figure(name, value)


def _bandwidth(value: float | None) -> str:
    return UNKNOWN if value is None else format_bandwidth(value)


def _peak(device: Device, dtype: str, instead: str | None) -> str:
    rate = device.peak(dtype)
    if rate is None and instead is not None:
        rate = device.peak(instead)
    return UNKNOWN if rate is None else format_rate(rate)


def _count(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def _watts(value: float | None) -> str:
    return UNKNOWN if value is None else f"{number(value)} W"


def _extreme(rows: Sequence[Row], choose: Any) -> str:
    return seconds(choose((row.median_s or 0.0 for row in rows), default=None))


def _spread(rows: Sequence[Row]) -> str:
    """Median over programs of (p90 - p10) / median."""
    spreads = sorted(
        (row.high_s - row.low_s) / row.median_s
        for row in rows
        if row.high_s is not None and row.low_s is not None and row.median_s
    )
    return percent(spreads[len(spreads) // 2]) if spreads else UNKNOWN
