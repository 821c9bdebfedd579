"""Tables for the terminal: plans and their real runs, fit for 60 columns and for no colour.

The tables of devices, profiles and simulated pipelines are in `listings` and can be had from here.
"""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from foreplan.planner.plan import Plan
from foreplan.planner.report._grid import Column, Facts, Grid, Narrow, Tone, bullets, heading, toned
from foreplan.planner.report.certainty import certainty, proof
from foreplan.planner.report.comparison import Contender, contenders
from foreplan.planner.report.listings import (
    device_table as device_table,
)
from foreplan.planner.report.listings import (
    devices_table as devices_table,
)
from foreplan.planner.report.listings import (
    pipeline_table as pipeline_table,
)
from foreplan.planner.report.listings import (
    profile_table as profile_table,
)
from foreplan.planner.report.quality_tables import quality_columns
from foreplan.planner.report.summary import Label, Summary, short_labels
from foreplan.planner.report.text import (
    UNKNOWN,
    bytes_of,
    compact,
    figure,
    number,
    percent,
    plain,
    run_seconds,
    seconds,
    words,
)
from foreplan.planner.verify.error_cause import error_cause
from foreplan.planner.verify.machine_share import machine_share
from foreplan.planner.verify.verification import CandidateResult, Verification

#: Width from which on measured decisions have a column that compares them.
_WITH_VERDICT = 80


def plan_tables(plan: Plan) -> RenderableType:
    """A plan: what was decided, what it is predicted to take, what it was preferred to."""
    summary = Summary.of(plan)
    parts: list[RenderableType] = [
        Text(f"{words(plan.kind)} plan: {summary.title}", style="bold"),
        Text(summary.headline),
        *_labels(summary.labels),
        _ranks(plan, summary),
        *_choices(summary),
        _limits(summary),
        _compared("Alternatives", contenders(plan, None)),
        heading("Prediction"),
        Facts(_prediction(plan)),
    ]
    if plan.assumptions:
        parts += [heading("Assumptions"), *bullets(plan.assumptions)]
    return Group(*parts)


def verification_tables(verification: Verification, plan: Plan | None = None) -> RenderableType:
    """A real run: predicted against measured, by candidate, rank and phase.

    Args:
        verification: the run.
        plan: its plan, for what was left out of the run.
    """
    chosen = verification.chosen
    parts: list[RenderableType] = [_verdict(verification)]
    cause = error_cause(chosen, verification.tolerance)
    parts += [Text(cause)] if cause else []
    share = machine_share(chosen, verification.tolerance)
    parts += [Text(share)] if share else []
    parts += [Text(f"note: {plain(note, 1000)}", style="yellow") for note in verification.notes]
    if plan is not None:
        rows = contenders(plan, verification)
    else:
        rows = [_contender(candidate) for candidate in verification.candidates]
    parts += [
        _compared("Predicted and measured", rows),
        *(
            Narrow(toned(f"{row.name} failed: {row.verdict}", "bad"), _WITH_VERDICT)
            for row in rows
            if row.tag == "failed"
        ),
        quality_columns(verification, plan),
        _measured_ranks(chosen),
        _memory(chosen),
        heading("Run"),
        Facts(_run(verification)),
    ]
    return Group(*parts)


# -------------------------------------------------------------------------------------------- plan


def _labels(labels: tuple[Label, ...]) -> list[RenderableType]:
    return [
        Text.assemble((f"{label.word.upper()}: ", "bold yellow"), label.sentence)
        for label in labels
    ]


def _ranks(plan: Plan, summary: Summary) -> Grid:
    """A row a rank: device, what it holds, busy, memory."""
    ranks, stages = plan.predicted.ranks, summary.by_rank()
    total = plan.predicted.total_s or 1.0
    columns = [
        Column("#", [str(k) for k in range(len(ranks))], numeric=True),
        Column("device", list(summary.devices)),
    ]
    if stages:
        columns.append(Column("layers", [stage.layers or UNKNOWN for stage in stages]))
        for place, name in enumerate(dict.fromkeys(n for stage in stages for n, _ in stage.fields)):
            cells = [dict(stage.fields).get(name, UNKNOWN) for stage in stages]
            columns.append(Column(name, cells, least=110 if place else 0))
    held = [sum(rank.memory_bytes.values()) for rank in ranks]
    room = [
        UNKNOWN if rank.capacity_bytes is None else bytes_of(rank.capacity_bytes - size)
        for rank, size in zip(ranks, held, strict=True)
    ]
    columns += [
        Column("busy", [percent(rank.compute_s / total) for rank in ranks], numeric=True),
        Column("compute", [seconds(rank.compute_s) for rank in ranks], True, 90),
        Column("transfers", [seconds(rank.communication_s) for rank in ranks], True, 120),
        Column("idle", [seconds(rank.bubble_s) for rank in ranks], True, 120),
        Column("memory", [bytes_of(size) for size in held], numeric=True),
        Column("of", [bytes_of(rank.capacity_bytes) for rank in ranks], True, 80),
        Column("free", room, True, 100),
    ]
    note = f"not used: {summary.unused}" if summary.unused else ""
    return Grid("Stages" if stages else "Ranks", columns, note)


def _choices(summary: Summary) -> list[Grid]:
    """What each device was given, keys of equal values in one row."""
    return [
        Grid(
            f"{choice.name.capitalize()} by device",
            [
                Column(choice.name, [names for names, _, _ in choice.rows]),
                Column("count", [str(count) for _, count, _ in choice.rows], numeric=True),
                *(
                    Column(device, [given[k] for _, _, given in choice.rows])
                    for k, device in enumerate(choice.devices)
                ),
            ],
        )
        for choice in summary.decision.choices
    ]


def _limits(summary: Summary) -> Grid:
    limits = summary.limits[:6]
    tones: dict[str, Tone] = {"exceeded": "bad", "tight": "warn", "close": "", "room": "good"}
    hidden = len(summary.limits) - len(limits)
    asked = any(limit.eased for limit in limits)
    return Grid(
        "Limits, tightest first",
        [
            Column("limit", [limit.what for limit in limits]),
            Column("state", [toned(limit.verdict, tones[limit.verdict]) for limit in limits]),
            Column("used", [limit.used for limit in limits], True),
            Column("allowed", [limit.limit for limit in limits], True),
            Column("free", [limit.free for limit in limits], True, 80),
            *([Column("what if", [limit.eased or UNKNOWN for limit in limits])] if asked else []),
        ],
        note=f"and {hidden} more with more room" if hidden > 0 else "",
    )


def _prediction(plan: Plan) -> list[tuple[str, str | Text]]:
    predicted = plan.predicted
    pairs: list[tuple[str, str | Text]] = [
        (
            "total",
            f"{seconds(predicted.total_s)} ({seconds(predicted.low_s)} to "
            f"{seconds(predicted.high_s)})",
        ),
        *(figure(name, value) for name, value in predicted.metrics.items()),
        *proof(plan),
        *certainty(plan),
    ]
    shares = sorted(plan.provenance.source_share.items(), key=lambda item: -item[1])
    if shares:
        text = ", ".join(f"{plain(name)} {percent(share)}" for name, share in shares)
        pairs.append(("prices by source", text))
    pairs.append(("plan", plan.digest[:16]))
    return pairs


def _compared(title: str, rows: list[Contender]) -> Grid:
    """The decisions side by side; measured columns only where something ran."""
    if len(rows) < 2 and all(row.measured_s is None for row in rows):
        return Grid(title, ())
    tones: dict[str, Tone] = {"chosen": "good", "failed": "bad"}
    names = [
        Text.assemble(row.name, " ", toned(f"[{row.tag}]", tones.get(row.tag, "warn")))
        if row.tag
        else Text(row.name)
        for row in rows
    ]
    columns = [
        Column("decision", names),
        Column("predicted", [seconds(row.predicted_s) for row in rows], True),
    ]
    if any(row.measured_s is not None for row in rows):
        spread = [
            UNKNOWN if row.p10_s is None else f"{seconds(row.p10_s)} – {seconds(row.p90_s)}"
            for row in rows
        ]
        columns += [
            Column("measured", [seconds(row.measured_s) for row in rows], True),
            Column("10–90 %", spread, True, 100),
            Column("error", [percent(row.error) for row in rows], True),
        ]
    if any(row.pace is not None for row in rows):
        paces = [UNKNOWN if row.pace is None else f"{row.pace:.2f}" for row in rows]
        columns += [
            Column("pace", paces, True, 100),
            Column("error at pace", [percent(row.error_at_pace) for row in rows], True),
        ]
    if any(row.share is not None for row in rows):
        columns.append(Column("best in", [percent(row.share) for row in rows], True, 70))
    if any(row.verdict for row in rows):
        least = 0 if len(columns) < 4 else _WITH_VERDICT
        columns.append(Column("compared", [row.verdict or UNKNOWN for row in rows], least=least))
    return Grid(title, columns)


# --------------------------------------------------------------------------------------------- run


def _verdict(verification: Verification) -> Text:
    chosen = verification.chosen
    passed = verification.passed
    mark = toned("PASSED" if passed else "NOT PASSED", "good" if passed else "bad")
    if chosen.measured_s is None:
        return Text.assemble(mark, f": {plain(chosen.failure or 'the run failed')}")
    text = f": {words(verification.kind)} plan took {seconds(chosen.measured_s)}"
    if chosen.predicted_s is not None:
        text += f", predicted {seconds(chosen.predicted_s)}"
    if chosen.error is not None:
        text += f" (error {percent(chosen.error)}, allowed {percent(verification.tolerance)})"
    if verification.regret is not None:
        text += f", regret {percent(verification.regret)}"
    return Text.assemble(mark, text)


def _contender(seen: CandidateResult) -> Contender:
    tag = {"chosen": "chosen", "rival": "rival"}.get(seen.role, "")
    name = "this plan" if seen.role == "chosen" else plain(seen.name)
    tag = tag if seen.limits_met else "misses a limit"
    if seen.failure is not None:
        return Contender(name, "failed", seen.predicted_s, verdict=plain(seen.failure))
    return Contender(
        name, tag, seen.predicted_s, seen.measured_s, seen.p10_s, seen.p90_s, seen.error,
        pace=seen.pace, error_at_pace=seen.error_at_pace,
    )  # fmt: skip


def _measured_ranks(chosen: CandidateResult) -> Grid:
    names = short_labels([rank.device for rank in chosen.ranks])
    rows: list[tuple[str, str, str, str, str, str]] = []
    for k, rank in enumerate(chosen.ranks):
        first = (str(k), names[k], "busy")
        rows.append(
            (*first, seconds(rank.predicted_s), seconds(rank.measured_s), percent(rank.error))
        )
        for p in rank.phases:
            times = seconds(p.predicted_s), run_seconds(p.measured_s)
            rows.append(("", "", plain(p.op), *times, percent(p.error)))
    titles = ("#", "device", "phase", "predicted", "measured", "error")
    columns = [
        Column(title, [row[c] for row in rows], numeric=c in (0, 3, 4, 5))
        for c, title in enumerate(titles)
    ]
    return Grid("Compute time of this plan by rank and phase", columns)


def _memory(chosen: CandidateResult) -> Grid:
    """Ledger against what was held, totals a rank; items are in the document.

    What a run cannot weigh (a workspace inside of library calls) is in a column of its own: what
    was held says nothing about it.
    """
    names = short_labels([rank.device for rank in chosen.ranks])
    ledger = [sum(i.predicted_bytes or 0 for i in rank.memory) for rank in chosen.ranks]
    held = [sum(i.held_bytes or 0 for i in rank.memory) for rank in chosen.ranks]
    if not any(ledger) and not any(held):
        return Grid("Memory", ())
    blind = [
        sum(i.predicted_bytes or 0 for i in rank.memory if i.held_bytes is None)
        for rank in chosen.ranks
    ]
    off = [percent(a / (b - c) - 1, signed=True) if b > c else UNKNOWN
           for a, b, c in zip(held, ledger, blind, strict=True)]  # fmt: skip
    return Grid(
        "Memory of this plan",
        [
            Column("#", [str(k) for k in range(len(names))], True),
            Column("device", list(names)),
            Column("ledger", [bytes_of(size) for size in ledger], True),
            Column("not weighed", [bytes_of(size) for size in blind], True),
            Column("held", [bytes_of(size) for size in held], True),
            Column("off", off, True),
            Column("process", [bytes_of(rank.held_bytes) for rank in chosen.ranks], True, 80),
        ],
    )


def _run(verification: Verification) -> list[tuple[str, str | Text]]:
    machine = verification.machine
    pairs: list[tuple[str, str | Text]] = []
    for agreement in verification.agreement:
        text = ", ".join(f"{words(k)} {compact(v)}" for k, v in agreement.details.items())
        shown = toned(agreement.said, "good" if agreement.passed else "bad")
        pairs.append((f"result, {agreement.mode} mode", shown + Text(f" {text}".rstrip())))
    if verification.rank_correlation is not None:
        pairs.append(("rank correlation", f"{verification.rank_correlation:.2f} (Spearman)"))
    load = f"{number(machine.load_before)} before, {number(machine.load_after)} after"
    pairs += [
        ("rounds", f"{verification.rounds}, {verification.backend}"),
        ("machine", f"{plain(machine.cpu)}, {machine.cores} cores"),
        ("load", load),
        ("plan", plain(verification.plan_digest)[:16]),
    ]
    return pairs
