"""Traffic for the terminal: a simulation, and a real run beside it."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from foreplan.planner.report._grid import Column, Facts, Grid, toned
from foreplan.planner.report.text import UNKNOWN, number, percent, plain, seconds
from foreplan.planner.serving.traffic_replay import PERCENTILES
from foreplan.planner.traffic_command import TrafficResult
from foreplan.planner.traffic_verification import TrafficVerification


def traffic_table(result: TrafficResult) -> Group:
    """Percentiles of the times, and how near to saturation the plan is."""
    figures = result.figures
    names = ("time_to_first_token", "time_per_output_token", "latency")
    times = [[figures.get(f"{name}_p{q}_s") for name in names] for q in PERCENTILES]
    limits = " and ".join(str(batch) for batch in sorted(set(result.batches)))
    note = "at most the plan's batch, as its launch files say; caches may hold more"
    if result.too_long:
        note += (
            f". {result.too_long} of {number(figures['requests'])} requests are longer than the "
            f"{result.longest} tokens that the plan is for: its launch files refuse those "
            "(--max-model-len), here they are served"
        )
    return Group(
        Grid(
            "Traffic (simulated)",
            [
                Column("", [name.replace("_", " ") for name in names]),
                *(
                    Column(f"p{q}", ["–" if c is None else seconds(c) for c in cells], True)
                    for q, cells in zip(PERCENTILES, times, strict=True)
                ),
            ],
        ),
        Text(),
        Facts(
            [
                ("tokens/s", number(figures["throughput_tokens_per_s"])),
                ("requests/s", number(figures["throughput_requests_per_s"])),
                ("saturates at requests/s", number(result.largest_rate_per_s)),
                ("largest share of a cache", percent(figures["most_cached"])),
                ("requests held by a replica", number(figures["most_held"])),
                ("of at most", limits),
            ]
        ),
        Text(note, style="dim"),
    )


def served_tables(served: TrafficVerification) -> Group:
    """Measured against simulated: times, rates, and what passes cost and took."""
    paced = served.pace is not None
    word = "passed" if served.passed else "NOT passed"
    judged = " and ".join(_words(name) for name in served.judged)
    agreement = served.agreement
    head = (
        f"Traffic on a {served.kind} plan: {word} ({judged} within {percent(served.tolerance)}; "
        f"tokens of {number(float(agreement.details['requests']))} requests as of each alone: "
        f"{agreement.said})"
    )
    figures = served.figures
    columns = [
        Column("", [_words(f.name) for f in figures]),
        Column("simulated", [_shown(f.name, f.simulated) for f in figures], numeric=True),
    ]
    if paced:
        columns.append(Column("at pace", [_shown(f.name, f.at_pace) for f in figures], True, 90))
    columns += [
        Column("measured", [_shown(f.name, f.measured) for f in figures], numeric=True),
        Column("least", [_shown(f.name, f.low) for f in figures], True, 110),
        Column("most", [_shown(f.name, f.high) for f in figures], True, 110),
        Column("error", [percent(f.error, signed=True) for f in figures], numeric=True),
    ]
    if paced:
        columns.append(
            Column("at pace", [percent(f.error_at_pace, signed=True) for f in figures], True, 90)
        )
    phases = served.phases
    return Group(
        Text(head, style="bold") if served.passed else toned(head, "bad"),
        *(Text(f"note: {plain(note, 1000)}", style="yellow") for note in served.notes),
        Grid("Simulated and measured", columns),
        Grid(
            "Passes",
            [
                Column("device", [phase.device for phase in phases]),
                Column("pass", [phase.op for phase in phases]),
                Column("number", [str(phase.passes) for phase in phases], numeric=True),
                Column("priced", [seconds(phase.priced_s) for phase in phases], numeric=True),
                Column("took", [seconds(phase.measured_s) for phase in phases], numeric=True),
                Column("error", [percent(p.error, signed=True) for p in phases], numeric=True),
            ],
            "means over all rounds; priced are the passes that ran",
        ),
        Text(),
        Facts(
            [
                ("requests", number(served.requests)),
                (
                    "arrivals/s",
                    "at once" if served.rate_per_s is None else number(served.rate_per_s),
                ),
                ("saturates at requests/s", number(served.largest_rate_per_s)),
                ("rounds", str(served.rounds)),
                ("pace of the machine", UNKNOWN if served.pace is None else number(served.pace)),
            ]
        ),
    )


def _words(name: str) -> str:
    return name.removesuffix("_per_s").removesuffix("_s").replace("_", " ") + (
        "/s" if name.endswith("_per_s") else ""
    )


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return UNKNOWN
    if name == "most_cached":
        return percent(value)
    return seconds(value) if name.endswith("_s") and not name.endswith("_per_s") else number(value)
