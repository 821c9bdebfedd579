"""What every solver returns: a status, an incumbent and a bound, kept apart.

A solver that ran into its limit has an incumbent and a bound but has proven nothing; a solver that
was given a cutoff may prove that nothing beats it without holding an incumbent of its own. Hence
``status`` says what was proven, ``value`` and ``objective`` what was found, and ``lower_bound``
how good anything could still be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from foreplan.errors import SpecError

T = TypeVar("T")


class SolutionStatus(StrEnum):
    """What a solver has proven about the problem (always: minimise)."""

    OPTIMAL = "optimal"
    """An incumbent whose gap is at most the tolerance that was asked for."""
    FEASIBLE = "feasible"
    """An incumbent; a limit came before its gap could be closed."""
    INFEASIBLE = "infeasible"
    """Proven: nothing meets the constraints."""
    CUTOFF = "cutoff"
    """Proven: nothing is better than the given cutoff by more than the tolerance."""
    LIMIT = "limit"
    """A limit came before anything was found or proven."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution(Generic[T]):
    """Answer of a minimising solver.

    Attributes:
        status: what was proven.
        value: the incumbent, ``None`` when there is none.
        objective: objective of the incumbent in the problem's unit, ``inf`` without one.
        lower_bound: proven bound on every feasible objective, ``-inf`` if nothing is known and
            ``inf`` if the problem is infeasible; never above ``objective``.
        evaluations: bound evaluations spent, the unit of deterministic limits.
        solver: name of the method.
        message: one line for a person, such as why nothing fits.

    Raises:
        SpecError: the record contradicts itself (a bound above its incumbent, a status that needs
            an incumbent without one).
    """

    status: SolutionStatus
    value: T | None
    objective: float
    lower_bound: float
    evaluations: int
    solver: str
    message: str = ""

    def __post_init__(self) -> None:
        has_value = self.status in (SolutionStatus.OPTIMAL, SolutionStatus.FEASIBLE)
        if has_value != (self.value is not None):
            raise SpecError(
                "Solution.value", got=self.value, expected=f"to agree with {self.status!s}"
            )
        if has_value != math.isfinite(self.objective):
            raise SpecError(
                "Solution.objective", got=self.objective, expected=f"to agree with {self.status!s}"
            )
        if not self.lower_bound <= self.objective:
            raise SpecError(
                "Solution.lower_bound", got=self.lower_bound, expected=f"<= {self.objective}"
            )

    @property
    def found(self) -> bool:
        """Whether there is an incumbent."""
        return self.value is not None

    @property
    def gap(self) -> float:
        """Proven relative gap ``(objective - lower_bound) / |objective|``; ``inf`` if unknown."""
        if not self.found:
            return math.inf
        if self.objective <= self.lower_bound:
            return 0.0
        if self.objective == 0.0 or not math.isfinite(self.lower_bound):
            return math.inf
        return (self.objective - self.lower_bound) / abs(self.objective)
