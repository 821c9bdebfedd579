"""`agreement_of`: whether the ranks of a plan computed what one process computes, and how well.

What took long is measured by then: an interruption, or a rank that fails here, leaves the times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from foreplan.planner.base import Planner
from foreplan.planner.verify.candidates import Candidate
from foreplan.planner.verify.group import RankFailed
from foreplan.planner.verify.rounds import Measured, Rounds
from foreplan.planner.verify.verification import AgreementResult

Say = Callable[[str], None]


def agreement_of(
    planner: Planner[Any, Any], problem: Any, runner: Rounds, chosen: Measured, say: Say
) -> list[AgreementResult]:
    """Compare the results of distributed runs with those of one process.

    Args:
        planner: of the plan's kind.
        problem: of the plan.
        runner: starts runs.
        chosen: the plan's own decision, run.
        say: hears what is going on.

    Returns:
        One a mode; none where the planner has no reference.
    """
    if type(planner).reference is Planner.reference:
        return []
    found: list[AgreementResult] = []
    for mode in planner.compared(problem):
        try:
            compared = _compared(planner, runner, chosen, mode, say)
        except RankFailed as failure:
            compared = _not_compared(mode, str(failure))
        except KeyboardInterrupt:  # what took long is measured, and would be lost
            say("interrupted: times are kept, results are not compared")
            return [*found, _not_compared(mode, "interrupted before it was compared")]
        if compared is not None:
            found.append(compared)
    return found


def _compared(
    planner: Planner[Any, Any], runner: Rounds, chosen: Measured, mode: str, say: Say
) -> AgreementResult | None:
    """Of one mode, ``None`` where one process has no result."""
    say(f"{mode} result in one process")
    expected = runner.reference(chosen.candidate, mode)
    if expected is None:
        return None
    say(f"{mode} result on the plan's ranks")
    parts = chosen.results if mode == "fast" else runner.once(chosen.candidate, mode)
    result, conflict = _merged(parts)
    if conflict is not None:
        details: dict[str, float | str] = {"conflict": f"ranks disagree about {conflict}"}
        return AgreementResult(mode=mode, passed=False, exact=False, details=details)
    agreed = planner.agree(result, expected, mode=mode)
    return AgreementResult(
        mode=mode, passed=agreed.passed, exact=agreed.exact, details=dict(agreed.details)
    )


def _not_compared(mode: str, why: str) -> AgreementResult:
    return AgreementResult(mode=mode, passed=False, exact=False, details={"failure": why})


def quality_of(
    planner: Planner[Any, Any], problem: Any, runner: Rounds, candidates: Sequence[Candidate],
    say: Say,
) -> tuple[dict[str, dict[str, float]], list[str]]:  # fmt: skip
    """How good each candidate's results are, by its name, and what could not be judged.

    Args:
        planner: of the plan's kind.
        problem: of the plan.
        runner: starts runs.
        candidates: to judge.
        say: hears what is going on.
    """
    found: dict[str, dict[str, float]] = {}
    notes: list[str] = []
    for candidate in candidates if planner.judges(problem) else ():
        say(f"quality of {candidate.name}")
        try:
            figures = runner.reference(candidate, "quality") or {}
        except RankFailed as failure:
            notes.append(f"the quality of {candidate.name} was not measured: {failure}")
            continue
        except KeyboardInterrupt:
            return found, [*notes, f"interrupted before the quality of {candidate.name} was known"]
        found[candidate.name] = {name: float(value) for name, value in figures.items()}
    return found, notes


def _merged(parts: Sequence[dict[str, Any] | None]) -> tuple[dict[str, Any], str | None]:
    """What all ranks say together, and the first thing of which two say different values."""
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in (part or {}).items():
            if key in merged and merged[key] != value:
                return merged, key
            merged[key] = value
    return merged, None
