"""Several plans and their real runs in one table and on one page.

The regret of a decision is its measured time over the fastest measured one of its plan that meets
every limit, minus 1. A plan that was made with ``--beside roofline`` ran the roofline's decision
too; where both sources decided the same, both have the same regret.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

import foreplan
from foreplan.datasets.storage import write_atomically
from foreplan.errors import SpecError
from foreplan.planner.plan import CHOSEN, Plan, load_plan
from foreplan.planner.report._grid import Column, Grid
from foreplan.planner.report._markup import Html, details, element, join, section, table
from foreplan.planner.report._plan_sections import decision_section
from foreplan.planner.report._run_sections import run_labels, verdict
from foreplan.planner.report.comparison import contenders
from foreplan.planner.report.html import fill_page
from foreplan.planner.report.summary import Label, Summary
from foreplan.planner.report.text import UNKNOWN, percent, plain, seconds, words
from foreplan.planner.verify.verification import Verification, load_verification

#: Sources of costs in the order of their trust.
_SOURCES = ("measured", "predicted", "roofline")


@dataclass(frozen=True, slots=True)
class Result:
    """One plan and its run.

    Attributes:
        plan, run: the documents.
        regrets: measured regret of the decision from each source of costs; ``None`` where the
            decision did not run or misses a limit, no entry where it was not asked for.
        name: for readers; the kind, unless several plans of one kind are shown.
    """

    plan: Plan
    run: Verification
    regrets: dict[str, float | None]
    name: str

    @classmethod
    def of(
        cls, plan: Plan, run: Verification, *, name: str | None = None, where: str = "verification"
    ) -> Result:
        """Compare a plan's candidates; ``where`` is the run's file, for errors.

        Raises:
            SpecError: the run is of another plan.
        """
        if run.plan_digest != plan.digest:
            raise SpecError(
                where, got=run.plan_digest[:12],
                expected=f"a run of this plan ({plan.digest[:12]})", fix="verify the plan again",
            )  # fmt: skip
        # Plans of early versions do not say what decided; these costs' decision is theirs.
        decided = plan.provenance.decided or {plan.provenance.costs: CHOSEN}
        return cls(
            plan, run,
            {
                source: run.regret if decided[source] == CHOSEN else _regret(run, decided[source])
                for source in _SOURCES if source in decided
            },
            name or words(plan.kind),
        )  # fmt: skip

    def document(self) -> dict[str, Any]:
        """The row as JSON; seconds and fractions."""
        chosen = self.run.chosen
        return {
            "kind": self.plan.kind, "name": self.name, "costs": self.plan.provenance.costs,
            "predicted_s": chosen.predicted_s, "measured_s": chosen.measured_s,
            "error": chosen.error, "regret": self.run.regret, "regret_by_costs": self.regrets,
            "passed": self.run.passed,
        }  # fmt: skip


def load_results(plans: Sequence[Path], runs: Sequence[Path]) -> list[Result]:
    """Read plans and their runs, given in the same order.

    Raises:
        SpecError: as many runs as plans are needed; a document that is wrong.
    """
    if len(plans) != len(runs):
        raise SpecError(
            "--verification", got=f"{len(runs)} for {len(plans)} plans",
            expected="one for each plan, in the same order",
            fix="'foreplan compare' takes two plans that did not run",
        )  # fmt: skip
    loaded = [load_plan(path) for path in plans]
    names = _names([plan.kind for plan in loaded], plans)
    return [
        Result.of(plan, load_verification(run), name=name, where=str(run))
        for plan, name, run in zip(loaded, names, runs, strict=True)
    ]


def _names(kinds: Sequence[str], files: Sequence[Path]) -> list[str]:
    """The kind of each plan, with as much of its path's end as tells those of one kind apart."""
    count = Counter(kinds)
    parts = [file.with_suffix("").parts for file in files]
    longest = max(map(len, parts), default=1)
    length = next(
        (n for n in range(1, longest) if len({of[-n:] for of in parts}) == len(parts)), longest
    )
    return [
        f"{words(kind)} {'/'.join(of[-length:])}" if count[kind] > 1 else words(kind)
        for kind, of in zip(kinds, parts, strict=True)
    ]


def overview_table(results: Sequence[Result]) -> RenderableType:
    """A line a plan: predicted, measured, error, and the regret of each source of costs."""
    columns = [
        Column("plan", [plain(result.name, 200) for result in results]),
        Column("predicted", [seconds(r.run.chosen.predicted_s) for r in results], True),
        Column("measured", [seconds(r.run.chosen.measured_s) for r in results], True),
        Column("error", [percent(r.run.chosen.error) for r in results], True),
    ]
    regrets = _regret_cells(results)
    own = {result.plan.provenance.costs for result in results}
    columns += [
        Column("regret" if own == {name} else f"regret,\n{name}", cells, True)
        for name, cells in regrets.items()
    ]
    title = "Plans and their real runs"
    note = "regret, source: of the decision from that source of costs, as measured"
    notes = dict.fromkeys(note for result in results for note in result.run.notes)
    return Group(
        Grid(title, columns, note), *(Text(f"note: {plain(n, 1000)}", "yellow") for n in notes)
    )


def write_overview(results: Sequence[Result], output: Path) -> None:
    """Write the page.

    Raises:
        SpecError: the path cannot be written.
    """
    write_atomically(output, render_overview(results))


def render_overview(results: Sequence[Result]) -> str:
    """One self-contained HTML page: the table, then every plan's decision and rivals."""
    regrets = _regret_cells(results)
    rows = [
        [
            plain(result.name, 200),
            seconds(result.run.chosen.predicted_s),
            seconds(result.run.chosen.measured_s),
            percent(result.run.chosen.error),
            *(cells[k] for cells in regrets.values()),
        ]
        for k, result in enumerate(results)
    ]
    head = ["Plan", "Predicted", "Measured", "Error", *(f"Regret, {name}" for name in regrets)]
    together = section(
        "Predicted and measured",
        table("Each plan and its real run", head, rows, numeric="." + "n" * (len(head) - 1)),
        note="Regret: measured time of the decision from a source of costs, over the fastest "
        "measured decision that meets every limit.",
    )
    labels: dict[str, Label] = {}
    for result in results:
        known = Summary.of(result.plan).labels
        for label in (*known, *run_labels(result.run, known)):
            labels.setdefault(label.sentence, label)
    kinds = ", ".join(dict.fromkeys(words(result.plan.kind) for result in results))
    source = "/".join(dict.fromkeys(result.plan.provenance.costs for result in results))
    return fill_page(
        page_title=f"Plans: {kinds}",
        kicker="plans and their real runs",
        title=_upper(kinds),
        headline=f"{len(results)} plans made from {source} costs, each run for real beside its "
        "alternatives.",
        labels=list(labels.values()),
        body=join([together, *(_plan_part(result) for result in results)]),
        footer=f"foreplan {foreplan.__version__} · "
        + " · ".join(f"{plain(r.name, 200)} {r.plan.digest[:16]}" for r in results),
    )


def _plan_part(result: Result) -> Html:
    summary = Summary.of(result.plan)
    rows = [
        [
            f"{row.name} [{row.tag}]" if row.tag else row.name,
            seconds(row.predicted_s),
            seconds(row.measured_s),
            percent(row.error),
            row.verdict or UNKNOWN,
        ]
        for row in contenders(result.plan, result.run)
    ]
    apart = result.name.removeprefix(words(result.plan.kind)).strip()
    title = f"{_upper(words(result.plan.kind))} plan: {summary.title}"
    return section(
        f"{title} ({plain(apart, 200)})" if apart else title,
        element("p", summary.headline),
        verdict(result.run),
        table(
            "Every decision that was compared",
            ["Decision", "Predicted", "Measured", "Error", "Compared"], rows, numeric=".nnn.",
        ),
        details("What was decided", _without_frame(decision_section(summary))),
    )  # fmt: skip


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _without_frame(part: Html) -> Html:
    """A section's content; its heading is said by who holds it."""
    start, end = part.find("</h2>"), part.rfind("</section>")
    return Html(part[start + len("</h2>") : end]) if start >= 0 else part


def _regret_cells(results: Sequence[Result]) -> dict[str, list[str]]:
    """Texts by source of costs, of the sources that any plan was asked for."""
    return {
        source: [percent(result.regrets.get(source)) for result in results]
        for source in _SOURCES
        if any(source in result.regrets for result in results)
    }


def _regret(run: Verification, name: str) -> float | None:
    eligible = [c.measured_s for c in run.candidates if c.limits_met and c.measured_s is not None]
    found = next((c for c in run.candidates if c.name == name), None)
    if found is None or found.measured_s is None or not found.limits_met or not eligible:
        return None
    return found.measured_s / min(eligible) - 1
