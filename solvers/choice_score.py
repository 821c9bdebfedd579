"""`ChoiceScore`: what a choice costs, from the problem's arrays alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreplan.errors import SpecError
from foreplan.solvers.choice_problem import ChoiceProblem, FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChoiceScore:
    """What a choice costs.

    Attributes:
        objective: ``base_value`` and all values, in the values' unit.
        usage: ``[R]`` what each row holds, ``base`` included.
        violations: one line for each row above its limit (beyond the shared float slack).
    """

    objective: float
    usage: FloatArray
    violations: tuple[str, ...]

    @property
    def feasible(self) -> bool:
        """Whether every row is within its limit."""
        return not self.violations


def evaluate(problem: ChoiceProblem, choice: Sequence[int]) -> ChoiceScore:
    """Score a choice from the problem's arrays alone; the one evaluator of this problem.

    Args:
        problem: the instance.
        choice: ``[N]`` option of every item, dependent ones included (``problem.complete``).

    Returns:
        The score; rows above their limits stand in ``violations``.

    Raises:
        SpecError: a wrong length, an option that does not exist, a group that disagrees, a
            dependent item with another option than those it follows give it.
    """
    completed = problem.complete(choice)
    for i, (got, expected) in enumerate(zip(choice, completed, strict=True)):
        if got != expected:
            raise SpecError(
                f"choice[{i}]", got=got, expected=f"{expected}, from the items that it follows"
            )
    objective, usage = problem.base_value, problem.base.copy()
    for item, c in zip(problem.items, completed, strict=True):
        objective += float(item.values[c])
        usage += item.weights[c]
    for pair in problem.pairs:
        at = completed[pair.producer], completed[pair.consumer]
        objective += float(pair.values[at])
        usage += pair.weights[at]
    usage.setflags(write=False)
    broken = tuple(
        f"{problem.rows[r]} holds {usage[r]:.6g}, {usage[r] - problem.limits[r]:.6g} above its "
        f"limit of {problem.limits[r]:.6g}"
        for r in np.flatnonzero(usage > problem.slack_limits)
    )
    return ChoiceScore(objective=objective, usage=usage, violations=broken)
