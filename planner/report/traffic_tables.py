"""A replay of traffic for the terminal."""

from __future__ import annotations

from rich.table import Table

from foreplan.planner.report.text import number, percent, seconds
from foreplan.planner.serving.traffic_replay import PERCENTILES
from foreplan.planner.traffic_command import TrafficResult


def traffic_table(result: TrafficResult) -> Table:
    """Percentiles of the times, and how near to saturation the plan is."""
    figures = result.figures
    table = Table(title="Traffic (simulated)", title_justify="left", box=None)
    table.add_column("")
    for q in PERCENTILES:
        table.add_column(f"p{q}", justify="right")
    for name in ("time_to_first_token", "time_per_output_token", "latency"):
        cells = [figures.get(f"{name}_p{q}_s") for q in PERCENTILES]
        table.add_row(name.replace("_", " "), *("–" if c is None else seconds(c) for c in cells))
    rate = figures["throughput_requests_per_s"]
    table.add_row("tokens/s", number(figures["throughput_tokens_per_s"]))
    table.add_row("requests/s", number(rate))
    table.add_row("saturates at requests/s", number(result.largest_rate_per_s))
    table.add_row("largest share of a cache", percent(figures["most_cached"]))
    table.add_row("requests held by a replica", number(figures["most_held"]))
    limits = " and ".join(str(batch) for batch in sorted(set(result.batches)))
    table.add_row("of at most", limits)
    table.caption = "at most the plan's batch, as its launch files say; caches may hold more"
    if result.too_long:
        table.caption += (
            f". {result.too_long} of {number(figures['requests'])} requests are longer than the "
            f"{result.longest} tokens that the plan is for: its launch files refuse those "
            "(--max-model-len), here they are served"
        )
    table.caption_justify = "left"
    return table
