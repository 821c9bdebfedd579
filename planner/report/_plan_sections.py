"""The page's parts that a plan alone can fill; each returns nothing where it has nothing to say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foreplan.planner.plan import Plan
from foreplan.planner.prediction import RankPrediction
from foreplan.planner.report._charts import Bar, Segment, bars, meter, palette
from foreplan.planner.report._markup import (
    Html,
    breakable,
    definitions,
    details,
    element,
    esc,
    join,
    rank_name,
    section,
    table,
)
from foreplan.planner.report.certainty import proof
from foreplan.planner.report.summary import Limit, Summary
from foreplan.planner.report.text import (
    UNKNOWN,
    bytes_of,
    figure,
    number,
    percent,
    plain,
    run_lengths,
    seconds,
    words,
)

TRANSFER, IDLE, REST = "waiting for transfers", "idle", "slowed by neighbours"
OTHER = "all other"
_MOST_CAUSES = 6
#: What of ``cause_s`` is no compute: transfers run beside it.
_BESIDE = ("collective",)
_TONE = {"exceeded": "bad", "tight": "warn", "close": "note", "room": "good"}


def decision_section(summary: Summary) -> Html:
    """Stages as a table, everything else as names and values."""
    stages = summary.decision.stages
    columns = list(dict.fromkeys(name for stage in stages for name, _ in stage.fields))
    rows = []
    for k, stage in enumerate(stages):
        given = dict(stage.fields)
        name = summary.device_of(k) or UNKNOWN
        cells = [given.get(column, UNKNOWN) for column in columns]
        rows.append([f"{k}", breakable(name), stage.layers or UNKNOWN, *cells])
    head = ["Stage", "Device", "Layers", *(column.capitalize() for column in columns)]
    folded = [
        element("h4", f"Stage {k}: {name}") + definitions(entries)
        for k, stage in enumerate(stages)
        for name, entries in stage.details
        if entries
    ]
    by_layer = dict.fromkeys(name for stage in stages for name, _ in stage.by_layer)
    return section(
        "Decision",
        definitions(summary.decision.fields),
        table("What each stage holds", head, rows),
        *(
            table(
                f"{choice.name.capitalize()} by device",
                [choice.name.capitalize(), "Count", *choice.devices],
                [[breakable(names), count, *given] for names, count, given in choice.rows],
                numeric=".n",
            )
            for choice in summary.decision.choices
        ),
        *(_layer_chart(summary, name) for name in by_layer),
        details("Details of each stage", *folded),
        note=f"Not used: {summary.unused}." if summary.unused else None,
    )


def _layer_chart(summary: Summary, field: str) -> Html:
    """One list of an entry a layer (bits), drawn layer by layer; empty where all are equal."""
    stages = [(k, stage, dict(stage.by_layer).get(field, ())) for k, stage in
              enumerate(summary.decision.stages)]  # fmt: skip
    values = sorted({value for _, _, entries in stages for value in entries}, key=_by_number)
    if len(values) < 2:
        return Html("")
    longest = max(len(entries) for _, _, entries in stages)
    rows = []
    for k, stage, entries in stages:
        segments, at = [], stage.first
        for value, count in run_lengths(entries):
            name = f"{at}" if count == 1 else f"{at}–{at + count - 1}"
            segments.append(Segment(f"{field} {value}", float(count), f"in {name}"))
            at += count
        rows.append(Bar(f"{k} · layers {stage.layers}", "", tuple(segments), float(longest)))
    return element("h3", f"{field.capitalize()} by layer") + bars(
        rows, palette([f"{field} {value}" for value in values])
    )


def _by_number(text: str) -> tuple[float, str]:
    """Numbers from high to low, then words."""
    try:
        return -float(text), text
    except ValueError:
        return float("inf"), text


def limits_section(limits: tuple[Limit, ...]) -> Html:
    """Limits with how much of each is used and what relaxing it would bring, tightest first."""
    asked = any(limit.eased for limit in limits)
    rows = [
        [
            breakable(limit.what),
            element("span", limit.verdict, class_=f"verdict {_TONE[limit.verdict]}"),
            meter(limit.share, _TONE[limit.verdict]),
            limit.used,
            limit.limit,
            limit.free,
            *([limit.eased or UNKNOWN] if asked else []),
        ]
        for limit in limits
    ]
    tight = [f"{limit.what} ({limit.free} free)" for limit in limits if limit.share >= 0.98]
    note = f"Tight: {', '.join(tight)}." if tight else "No limit is tight."
    head = ["Limit", "State", "Share", "Used", "Allowed", "Free", *(["What if"] if asked else [])]
    return section(
        "What limits the plan",
        table("Limits, tightest first", head, rows, numeric="...nnn"),
        note=note,
    )


def memory_section(
    plan: Plan, summary: Summary, held: Mapping[int, Mapping[str, int]] | None = None
) -> Html:
    """Memory by item and device; below each bar what a real run held."""
    ranks = plan.predicted.ranks
    totals: dict[str, int] = {}
    for items in [*(rank.memory_bytes for rank in ranks), *(held or {}).values()]:
        for name, size in items.items():
            totals[name] = totals.get(name, 0) + size
    names = sorted(totals, key=lambda name: -totals[name])
    if not any(totals.values()):
        return Html("")
    largest = max(sum(rank.memory_bytes.values()) for rank in ranks)
    rows: list[Bar] = []
    for k, rank in enumerate(ranks):
        total = sum(rank.memory_bytes.values())
        full = float(max(rank.capacity_bytes or largest, total))
        value, tone = bytes_of(total), ""
        if rank.capacity_bytes:
            free = rank.capacity_bytes - total
            value = f"{bytes_of(total)} of {bytes_of(rank.capacity_bytes)}"
            tone = "bad" if free < 0 else "warn" if free < 0.02 * rank.capacity_bytes else ""
        segments = _segments(rank.memory_bytes, names)
        rows.append(Bar(rank_name(k, summary.devices[k]), value, segments, full, tone=tone))
        if held and k in held:
            real = _segments(held[k], names)
            text = f"{bytes_of(sum(held[k].values()))} held"
            rows.append(Bar("in the real run", text, real, full, thin=True))
    cells = [
        [rank_name(k, summary.devices[k]), *(bytes_of(rank.memory_bytes.get(n)) for n in names)]
        for k, rank in enumerate(ranks)
    ]
    head = ["Rank", *(words(name).capitalize() for name in names)]
    return section(
        "Memory",
        bars(rows, palette([words(name) for name in names])),
        details("As a table", table("Bytes by item", head, cells, numeric="." + "n" * len(names))),
        note="At its peak; the width is what each device may use.",
    )


def _segments(items: Mapping[str, int], names: list[str]) -> tuple[Segment, ...]:
    return tuple(
        Segment(words(name), float(items[name]), bytes_of(items[name]))
        for name in names
        if items.get(name, 0) > 0
    )


def time_section(plan: Plan, summary: Summary) -> Html:
    """Where each rank's share of the predicted run goes, by cause."""
    ranks = plan.predicted.ranks
    parts = _grouped([_causes(rank) for rank in ranks])
    names = list(dict.fromkeys(name for causes in parts for name in causes))
    names.sort(key=lambda name: (name == OTHER, -sum(causes.get(name, 0.0) for causes in parts)))
    colours = palette(names, {REST: "rest", TRANSFER: "wait", IDLE: "idle"})
    rows = []
    for k, (rank, causes) in enumerate(zip(ranks, parts, strict=True)):
        whole = {**causes, TRANSFER: rank.communication_s, IDLE: rank.bubble_s}
        segments = tuple(
            Segment(name, whole[name], seconds(whole[name]))
            for name in colours
            if whole.get(name, 0.0) > 0
        )
        busy = rank.compute_s / plan.predicted.total_s if plan.predicted.total_s else 0.0
        rows.append(
            Bar(
                rank_name(k, summary.devices[k]),
                f"busy {percent(busy)}",
                segments,
                max(plan.predicted.total_s, sum(whole.values())),
            )
        )
    phases = list(dict.fromkeys(name for rank in ranks for name in rank.phase_s))
    columns = [*names, TRANSFER, IDLE]
    cells = [
        [
            rank_name(k, summary.devices[k]),
            *(seconds(rank.phase_s.get(name)) for name in phases),
            *(
                seconds({**causes, TRANSFER: rank.communication_s, IDLE: rank.bubble_s}.get(name))
                for name in columns
            ),
        ]
        for k, (rank, causes) in enumerate(zip(ranks, parts, strict=True))
    ]
    head = ["Rank", *(f"Phase {name}" for name in phases), *(c.capitalize() for c in columns)]
    return section(
        "Where the time goes",
        bars(rows, colours) if rows else Html(""),
        details(
            "As a table",
            table("Predicted seconds by phase and cause", head, cells, numeric="." + "n" * 99),
        ),
        note=f"Predicted, of {seconds(plan.predicted.total_s)}; grey is time a device waits.",
    )


def _grouped(parts: list[dict[str, float]]) -> list[dict[str, float]]:
    """The same with all but the largest causes summed."""
    totals: dict[str, float] = {}
    for causes in parts:
        for name, value in causes.items():
            totals[name] = totals.get(name, 0.0) + value
    ordered = sorted((name for name in totals if name != REST), key=lambda name: -totals[name])
    small = set(ordered[_MOST_CAUSES:])
    if len(small) < 2:
        return parts
    grouped = []
    for causes in parts:
        kept = {name: value for name, value in causes.items() if name not in small}
        kept[OTHER] = sum(value for name, value in causes.items() if name in small)
        grouped.append(kept)
    return grouped


def _causes(rank: RankPrediction) -> dict[str, float]:
    """Compute time by cause; adds up to ``compute_s``."""
    causes = {words(k): v for k, v in rank.cause_s.items() if k not in _BESIDE and v > 0}
    total = sum(causes.values())
    if not causes:
        return {"compute": rank.compute_s} if rank.compute_s > 0 else {}
    if total > rank.compute_s:
        return {name: value * rank.compute_s / total for name, value in causes.items()}
    # Prices are of work alone on its host; the simulator slows down ranks that work side by side.
    if rank.compute_s - total > 0.002 * rank.compute_s:
        causes[REST] = rank.compute_s - total
    return causes


def foundations_section(plan: Plan) -> Html:
    """Assumptions, the proven bound, and where the prices come from."""
    shares = sorted(plan.provenance.source_share.items(), key=lambda item: -item[1])
    priced = Html("")
    if shares:
        total = sum(value for _, value in shares) or 1.0
        row = Bar(
            "prices by source",
            "",
            tuple(Segment(plain(name), value, percent(value)) for name, value in shares),
            total,
        )
        priced = bars([row], palette([plain(name) for name, _ in shares]))
    notes = [element("li", esc(text, 1000)) for text in plan.assumptions]
    origin: list[tuple[object, object]] = [
        ("foreplan", plan.provenance.foreplan),
        ("costs", plan.provenance.costs),
        ("seed", plan.provenance.seed),
        ("plan", element("code", plan.digest[:16])),
        *(
            (f"profile of {plain(device, 80)}", element("code", digest[:16]))
            for device, digest in plan.provenance.profiles.items()
        ),
    ]
    return section(
        "What it rests on",
        element("h3", "Assumptions") + element("ul", *notes, class_="notes") if notes else "",
        element("h3", "Prices by source") + priced if priced else "",
        element("h3", "Proof") + definitions(proof(plan)),
        element("h3", "Origin") + definitions(origin),
    )


def workload_line(plan: Plan) -> Html:
    """The workload as one line of names and values."""
    pairs = [figure(name, value) for name, value in plan.workload.items() if _says(value)]
    return join(
        element("span", name, Html(" "), element("b", value), class_="fact")
        for name, value in pairs
    )


def _says(value: Any) -> bool:
    """Whether a field asks for something: not where it is left out, empty, of such parts, or 0.

    A switch that is off does: it may be on where nothing is said.
    """
    if isinstance(value, dict):
        return any(map(_says, value.values()))
    return value is False or (value is not None and value not in ("", [], 0))


def metric_cards(plan: Plan) -> list[tuple[str, str]]:
    """The planner's own figures that are not settings of the decision."""
    return [
        figure(name, value)
        for name, value in plan.predicted.metrics.items()
        if name not in plan.decision
    ]


def interval(plan: Plan) -> str:
    """``2.9 s to 3.6 s``."""
    return f"{seconds(plan.predicted.low_s)} to {seconds(plan.predicted.high_s)}"


def ratio(value: float) -> str:
    """``×1.31``."""
    return f"×{number(round(value, 3))}"
