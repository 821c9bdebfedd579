"""What `bubbles_on_gpus.py` measured, as tables: `tables`, from its ``results.json``.

A plan's gain is the step time of the fastest baseline that fills nothing inside, over its own,
minus 1; the aim is a predicted gain within 3 points of the measured one and a step within 5 %.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

#: What fills nothing inside the backbone's step, as the planner calls it.
_UNFILLED = ("three phases", "balanced chain", "encoders on the first stage")
_SOURCES = ("measured", "predicted", "roofline")


def tables(everything: Mapping[str, Any]) -> str:
    """Every decision of every shape, then one line a shape: gain, regret by source of costs."""
    rows = [
        "| shape | decision | predicted | measured | error | operator by operator "
        "| bubble time filled | agreement |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines = [
        "| shape | gain predicted | measured | regret measured costs | predicted | roofline |",
        "|---|---|---|---|---|---|",
    ]
    for shape, found in everything.items():
        if "failed" in found:
            rows.append(f"| {shape} | no plan: {found['failed'][:120]} | | | | | | |")
            continue
        ran = dict(_ran(found["results"]))
        rows += [_row(shape, label, row) for label, row in ran.items()]
        rows += [
            f"| {shape} | {label} | hung {len(row['hung'])} times | | | | | |"
            for label, row in found["results"].items()
            if "hung" in row
        ]
        if ran:
            lines.append(_summary(shape, ran))
    return "\n".join([*rows, "", *lines])


def _ran(results: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each decision with its measurement; equal ones share one."""
    for label, row in results.items():
        other = results.get(row.get("as", label), {})
        if "measured_s" in other:
            yield label, {**other, **row}


def _row(shape: str, label: str, row: Mapping[str, Any]) -> str:
    predicted, measured = row["predicted_s"], row["measured_s"]
    same = f" (= {row['as']})" if "as" in row else ""
    agreed = row.get("agreement") or {}
    word = "" if not agreed else "exact" if agreed["exact"] else f"passed: {agreed['passed']}"
    eager = f"{1e3 * row['eager']['measured_s']:.1f} ms" if "eager" in row else ""
    return (
        f"| {shape} | {label}{same} | {1e3 * predicted:.1f} ms | {1e3 * measured:.1f} ms "
        f"| {100 * (predicted / measured - 1):+.1f} % | {eager} "
        f"| {100 * row['bubbles']['filled_share']:.0f} % | {word} |"
    )


def _summary(shape: str, ran: Mapping[str, Mapping[str, Any]]) -> str:
    def gain(key: str) -> str:
        bare = [row[key] for label, row in ran.items() if label.startswith(_UNFILLED)]
        if not bare or "measured" not in ran:
            return "-"
        return f"{100 * (min(bare) / ran['measured'][key] - 1):.1f} %"

    best = min(row["measured_s"] for row in ran.values())
    regrets = [
        f"{100 * (ran[source]['measured_s'] / best - 1):.1f} %" if source in ran else "-"
        for source in _SOURCES
    ]
    cells = [shape, gain("predicted_s"), gain("measured_s"), *regrets]
    return f"| {' | '.join(cells)} |"
