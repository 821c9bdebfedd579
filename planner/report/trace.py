"""`render_trace`: predicted and measured timelines as one Chrome trace, for Perfetto.

Two processes, one above the other, with a thread for each stream of each rank. Both start at zero.
"""

from __future__ import annotations

import json
from typing import Any

from foreplan.cost_models.timeline import Timeline
from foreplan.planner.report.text import plain

#: Perfetto multiplies microseconds by 1000 and cuts off: a start of 1.001 us would become 1000 ns
#: and lie inside the action before it. A fifth of a nanosecond more survives both that and
#: rounding; a duration that is cut off only leaves a gap.
_NUDGE_NS = 0.2


def render_trace(*timelines: Timeline | None) -> str:
    """Chrome trace (JSON text) of the timelines that are given.

    Args:
        timelines: for instance predicted and measured; ``None`` is left out.
    """
    events: list[dict[str, Any]] = []
    drawn = [timeline for timeline in timelines if timeline is not None]
    for process, timeline in enumerate(drawn):
        name = "predicted" if timeline.kind == "simulated" else timeline.kind
        events += _events(timeline, process, name)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False)


def _events(timeline: Timeline, process: int, name: str) -> list[dict[str, Any]]:
    """Events in whole nanoseconds, so that neighbours touch and never overlap."""
    events = timeline.trace_events(process=process, name=name)
    zero_us = min((e["ts"] for e in events if e["ph"] == "X"), default=0.0)
    ranks = {device: rank for rank, device in enumerate(timeline.schedule.devices)}
    result: list[dict[str, Any]] = [_sort("process_sort_index", process, None, process)]
    for event in events:
        if event["ph"] != "X":
            event["args"] = {key: plain(value) for key, value in event["args"].items()}
            result.append(event)
            if event["name"] == "thread_name":
                order = _rank_of(event["args"]["name"], len(ranks)) * 1000 + event["tid"] % 1000
                result.append(_sort("thread_sort_index", process, event["tid"], order))
            continue
        start = round((event["ts"] - zero_us) * 1e3)
        end = round((event["ts"] + event["dur"] - zero_us) * 1e3)
        result.append(
            event
            | {
                "name": plain(event["name"]),
                "ts": (start + _NUDGE_NS) / 1e3,
                "dur": (end - start) / 1e3,
            }
        )
    return result


def _sort(name: str, process: int, thread: int | None, order: int) -> dict[str, Any]:
    where = {"pid": process} if thread is None else {"pid": process, "tid": thread}
    return {"ph": "M", "name": name, **where, "args": {"sort_index": order}}


def _rank_of(label: str, ranks: int) -> int:
    """Rank of a thread named ``rank <r> <device> <lane>``."""
    words = label.split(" ", 2)
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else ranks
