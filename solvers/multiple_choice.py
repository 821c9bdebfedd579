"""Solvers of the multiple-choice problem: see ``choice_problem`` for the problem itself."""

from __future__ import annotations

from foreplan.solvers.choice_problem import (
    Choice,
    ChoiceItem,
    ChoicePair,
    ChoiceProblem,
    ChoiceScore,
    evaluate,
)

__all__ = [
    "Choice",
    "ChoiceItem",
    "ChoicePair",
    "ChoiceProblem",
    "ChoiceScore",
    "evaluate",
]
