"""What a run measured of how good results are, beside what was predicted and what was allowed."""

from __future__ import annotations

from dataclasses import dataclass

from foreplan.planner.plan import Plan
from foreplan.planner.report.text import UNKNOWN, number, plain, words
from foreplan.planner.verify.verification import Verification


@dataclass(frozen=True, slots=True)
class QualityFigure:
    """One figure of every decision that was judged.

    Attributes:
        title: ``perplexity increase``, or ``predicted perplexity increase``.
        cells: a text for each decision.
    """

    title: str
    cells: tuple[str, ...]


def judged(verification: Verification) -> tuple[str, ...]:
    """Names of the decisions whose results were judged."""
    return tuple(plain(c.name) for c in verification.candidates if c.quality)


def quality_figures(verification: Verification, plan: Plan | None) -> list[QualityFigure]:
    """Figures by name, each after the plan's own figure of that name where it has one.

    Args:
        verification: the run; empty where it judged nothing.
        plan: its plan.
    """
    candidates = [candidate for candidate in verification.candidates if candidate.quality]
    foretold = {} if plan is None else {"chosen": plan.predicted.metrics}
    if plan is not None:
        foretold |= {other.name: other.predicted.metrics for other in plan.alternatives}
    figures = []
    for name in dict.fromkeys(name for candidate in candidates for name in candidate.quality):
        predicted = [foretold.get(candidate.name, {}).get(name) for candidate in candidates]
        title = words(name)
        if any(value is not None for value in predicted):
            figures.append(QualityFigure(f"predicted {title}", _shown(predicted)))
        measured = [candidate.quality.get(name) for candidate in candidates]
        figures.append(QualityFigure(title, _shown(measured)))
    return figures


def quality_limits(verification: Verification, plan: Plan) -> list[tuple[str, float, float]]:
    """(name, measured, largest allowed) of the chosen decision, where the workload has a limit."""
    found = []
    for name, value in verification.chosen.quality.items():
        most = plan.workload.get(f"max_{name}")
        if isinstance(most, int | float) and not isinstance(most, bool):
            found.append((name, value, float(most)))
    return found


def _shown(values: list[float | None]) -> tuple[str, ...]:
    return tuple(UNKNOWN if value is None else number(value) for value in values)
