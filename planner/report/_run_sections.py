"""The page's parts about a real run, and the comparison with the alternatives."""

from __future__ import annotations

from foreplan.planner.plan import Plan
from foreplan.planner.report._charts import Bar, Segment, bars
from foreplan.planner.report._markup import (
    Html,
    definitions,
    details,
    element,
    rank_name,
    section,
    table,
)
from foreplan.planner.report.certainty import certainty, close_decisions
from foreplan.planner.report.comparison import Contender, contenders
from foreplan.planner.report.quality import judged, quality_figures, quality_limits
from foreplan.planner.report.summary import Label, Summary
from foreplan.planner.report.text import (
    UNKNOWN,
    bytes_of,
    compact,
    number,
    percent,
    plain,
    run_seconds,
    seconds,
    words,
)
from foreplan.planner.verify.error_cause import error_cause
from foreplan.planner.verify.machine_share import machine_share
from foreplan.planner.verify.verification import (
    CandidateResult,
    Phase,
    RankResult,
    Verification,
)

Card = tuple[str, str, str, str]

#: Words in a run's notes that name the label they belong to.
_LABELS = (
    ("random", "random weights"),
    ("slice", "slice of a chip"),
    ("emulated", "emulated link"),
)


def run_labels(verification: Verification | None, known: tuple[Label, ...]) -> list[Label]:
    """Labels of the run's notes that the plan does not carry already."""
    if verification is None:
        return []
    labels = []
    for note in verification.notes:
        word = next((name for key, name in _LABELS if key in note.lower()), "note")
        if word == "note" or word not in {label.word for label in known}:
            labels.append(Label(word, plain(note, 600)))
    return labels


def verdict(verification: Verification | None) -> Html:
    """What the real run said, in a sentence under the headline."""
    if verification is None:
        return Html("")
    chosen = verification.chosen
    tone = "good" if verification.passed else "bad"
    mark = element("b", "Verified" if verification.passed else "Not verified", class_=tone)
    if chosen.measured_s is None:
        text = f": the real run failed: {plain(chosen.failure or 'no reason was given')}"
    else:
        text = f": {seconds(chosen.measured_s)} in a real run"
        if chosen.error is not None:
            within = "within" if chosen.error <= verification.tolerance else "beyond"
            text += (
                f", {percent(chosen.error)} from the prediction, {within} the "
                f"{percent(verification.tolerance)} allowed"
            )
        wrong = [a for a in verification.agreement if not a.passed]
        if differ := [a.mode for a in wrong if "failure" not in a.details]:
            text += f"; the result differs from one process ({', '.join(differ)} mode)"
        if untold := [a.mode for a in wrong if "failure" in a.details]:
            text += f"; the result was not compared with one process ({', '.join(untold)} mode)"
        text += "."
        if cause := error_cause(chosen, verification.tolerance):
            text += f" {cause[0].upper()}{cause[1:]}."
        if share := machine_share(chosen, verification.tolerance):
            text += f" {share[0].upper()}{share[1:]}."
    return element("p", mark, text, class_="headline")


def run_cards(plan: Plan, verification: Verification | None) -> list[Card]:
    """Measured total, error, regret, and quality with a limit: (what, big, more, tone)."""
    if verification is None:
        return []
    chosen = verification.chosen
    if chosen.measured_s is None:
        return [("Measured", "failed", "see below", "bad")]
    spread = f"10–90 %: {seconds(chosen.p10_s)} to {seconds(chosen.p90_s)}"
    cards: list[Card] = [("Measured", seconds(chosen.measured_s), spread, "")]
    if chosen.error is not None:
        tone = "good" if chosen.error <= verification.tolerance else "bad"
        allowed = f"{percent(verification.tolerance)} allowed"
        cards.append(("Error", percent(chosen.error), allowed, tone))
    if verification.regret is not None:
        ran = sum(c.measured_s is not None and c.limits_met for c in verification.candidates)
        tone = "good" if verification.regret <= 0.02 else "warn"
        cards.append(("Regret", percent(verification.regret), f"best of {ran} that ran", tone))
    for name, value, most in quality_limits(verification, plan):
        tone = "good" if value <= most else "bad"
        more = f"measured, {number(most)} allowed"
        cards.append((words(name).capitalize(), number(value), more, tone))
    return cards


def held_bytes(verification: Verification | None) -> dict[int, dict[str, int]]:
    """Bytes by item that each rank of the chosen plan held."""
    if verification is None:
        return {}
    held = {}
    for k, rank in enumerate(verification.chosen.ranks):
        items = {item.item: item.held_bytes for item in rank.memory if item.held_bytes}
        if items:
            held[k] = items
    return held


def run_section(plan: Plan, verification: Verification | None, summary: Summary) -> Html:
    """Predicted against measured by rank and phase, quality, agreement, memory and machine."""
    if verification is None:
        return Html("")
    chosen = verification.chosen
    notes = [element("li", plain(note, 1000)) for note in verification.notes]
    return section(
        "The real run",
        definitions(_facts(verification)),
        _rank_table(verification, summary),
        _quality_table(plan, verification),
        details("Memory held against the ledger", _memory_table(chosen, summary)),
        details("Notes", element("ul", *notes, class_="notes") if notes else ""),
    )


def _facts(verification: Verification) -> list[tuple[object, object]]:
    machine, chosen = verification.machine, verification.chosen
    load = f"{number(machine.load_before)} before, {number(machine.load_after)} after"
    facts: list[tuple[object, object]] = [
        ("rounds", f"{verification.rounds}, {verification.backend}"),
        ("machine", f"{machine.cpu}, {machine.cores} cores"),
        ("load", load),
    ]
    if chosen.rounds_s:
        facts.append(("totals", ", ".join(seconds(value) for value in chosen.rounds_s[:12])))
    for agreement in verification.agreement:
        said = agreement.said.lower()
        tone = "good" if agreement.passed else "bad"
        text = ", ".join(f"{words(k)} {compact(v)}" for k, v in agreement.details.items())
        shown = element("span", said, class_=f"verdict {tone}")
        if text:
            shown += Html("&nbsp;") + f"({text})"
        facts.append((f"result, {agreement.mode} mode", shown))
    if verification.rank_correlation is not None:
        facts.append(("rank correlation", f"{verification.rank_correlation:.2f} (Spearman)"))
    return facts


def _quality_table(plan: Plan, verification: Verification) -> Html:
    figures = quality_figures(verification, plan)
    if not figures:
        return Html("")
    columns = [one.cells for one in figures]
    rows = list(zip(judged(verification), *columns, strict=True))
    head = ["Decision", *(one.title.capitalize() for one in figures)]
    return table("Quality on held-out text", head, rows, numeric="." + "n" * len(figures))


def _rank_table(verification: Verification, summary: Summary) -> Html:
    """A row a rank; each cell is predicted, measured and the error between them."""
    ranks = verification.chosen.ranks
    phases = list(dict.fromkeys(phase.op for rank in ranks for phase in rank.phases))
    rows = []
    for k, rank in enumerate(ranks):
        seen = {phase.op: phase for phase in rank.phases}
        parts = [rank, *(seen.get(op) for op in phases)]
        cells = [_both(part, verification.tolerance) for part in parts]
        rows.append([rank_name(k, _device(k, rank.device, summary)), *cells])
    head = ["Rank", "Busy", *(words(op).capitalize() for op in phases)]
    caption = "Compute time by rank and phase: predicted → measured"
    return table(caption, head, rows, numeric="." + "n" * len(head))


def _both(part: RankResult | Phase | None, tolerance: float) -> Html | str:
    if part is None:
        return UNKNOWN
    tone = "off bad" if part.error is not None and part.error > tolerance else "off"
    times = element("span", f"{seconds(part.predicted_s)} → {run_seconds(part.measured_s)}")
    return times + element("span", percent(part.error), class_=tone)


def _memory_table(chosen: CandidateResult, summary: Summary) -> Html:
    rows = []
    for k, rank in enumerate(chosen.ranks):
        name = rank_name(k, _device(k, rank.device, summary))
        rows += [
            [name, words(item.item), bytes_of(item.predicted_bytes), bytes_of(item.held_bytes)]
            for item in rank.memory
        ]
        if rank.held_bytes is not None:
            rows.append([name, "the process in all", UNKNOWN, bytes_of(rank.held_bytes)])
    head = ["Rank", "Item", "Ledger", "Held"]
    return table("Bytes of the kernels and of the process", head, rows, numeric="..nn")


def _device(rank: int, label: str, summary: Summary) -> str:
    return summary.devices[rank] if rank < len(summary.devices) else plain(label)


# ------------------------------------------------------------------------------------ alternatives


def alternatives_section(plan: Plan, verification: Verification | None) -> Html:
    """The chosen decision among the others."""
    every = contenders(plan, verification)
    if len(every) < 2:
        return Html("")
    ran = verification is not None
    rated = any(one.share is not None for one in every)
    timed = any(one.pace is not None for one in every)
    head = ["Decision", "Predicted", *(["Measured", "10–90 %", "Error"] if ran else [])]
    head += [*(["Pace", "Error at pace"] if timed else [])]
    head += [*(["Best in"] if rated else []), "Compared"]
    rows = []
    for one in every:
        cells: list[object] = [_named(one), seconds(one.predicted_s)]
        if ran:
            spread = UNKNOWN
            if one.p10_s is not None and one.p90_s is not None:
                spread = f"{seconds(one.p10_s)} – {seconds(one.p90_s)}"
            cells += [seconds(one.measured_s), spread, percent(one.error)]
        if timed:
            pace = UNKNOWN if one.pace is None else f"{one.pace:.2f}"
            cells += [pace, percent(one.error_at_pace)]
        if rated:
            cells.append(percent(one.share))
        rows.append([*cells, one.verdict or UNKNOWN])
    note = "The plan keeps its alternatives, and verifying it runs them beside the chosen decision."
    if timed:
        note += (
            " Pace is what programs of the devices' profiles took between the rounds over what the "
            "profiles say; the error at pace is that of the prediction times it."
        )
    return section(
        "Alternatives",
        _chart(every),
        table(
            "The plan and what it was preferred to", head, rows,
            numeric="." + "n" * (len(head) - 2),
        ),
        *_confidence(plan),
        note=note,
    )  # fmt: skip


def _confidence(plan: Plan) -> list[Html]:
    """How sure the choice is: figures, and the close decisions that are no alternatives."""
    pairs = certainty(plan)
    if not pairs:
        return []
    draws = plan.confidence.draws
    lead = (
        f"All prices were drawn {draws} times from their intervals, and these decisions timed "
        "again: a share says in how many of the draws a decision is the best"
        + (" of those within the time limit." if plan.confidence.in_time is not None else ".")
    )
    near = [(name, percent(share)) for name, share in close_decisions(plan)]
    return [
        element("h3", "Confidence"),
        element("p", lead, class_="note"),
        definitions(pairs),
        details(
            "Close decisions that took part",
            table("Met by the search, not run", ["Decision", "Best in"], near, numeric=".n"),
        ),
    ]


def _named(one: Contender) -> Html:
    name = element("span", one.name)
    if not one.tag:
        return name
    tone = {"chosen": "good", "failed": "bad"}.get(one.tag, "warn")
    return name + element("span", one.tag, class_=f"tag {tone}")


def _chart(every: list[Contender]) -> Html:
    """Predicted above measured totals."""
    longest = max((max(c.predicted_s or 0.0, c.measured_s or 0.0) for c in every), default=0.0)
    rows = []
    for one in every:
        if one.predicted_s is None:
            continue
        predicted = Segment("predicted", one.predicted_s, seconds(one.predicted_s))
        rows.append(Bar(one.name, predicted.text, (predicted,), longest))
        if one.measured_s is not None:
            measured = Segment("measured", one.measured_s, seconds(one.measured_s))
            rows.append(Bar("", measured.text, (measured,), longest, thin=True))
    return bars(rows, {"predicted": "f0", "measured": "f1"})
