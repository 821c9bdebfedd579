"""A replay of traffic for the terminal."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from foreplan.planner.report._grid import Column, Facts, Grid
from foreplan.planner.report.text import number, percent, seconds
from foreplan.planner.serving.traffic_replay import PERCENTILES
from foreplan.planner.traffic_command import TrafficResult


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
