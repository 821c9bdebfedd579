"""A chain problem under limits on time to first token and time per token.

By the law of ``chain_problem`` the time to the first token is the prefill term and the time per
token the decode term's factor ``max(sum D, m max D)``. Scaling all prefill times by ``1 + u`` and
all decode times by ``1 + w / (n - 1)`` makes the solver weigh what is limited, so that Lagrange
multipliers ``u, w >= 0`` give answers within the limits and, with the multipliers' own term taken
off, bounds on every answer within them::

    L(u, w) = min T + u (ttft - limit) + w (step - limit)  <=  min { T : within the limits }

Between supported points of the two times there may be better answers than multipliers reach. Under
the best multipliers found, a second search takes only what is within the limits (``_chain_within``)
and goes on until its bound meets its answer, or its evaluations are spent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foreplan.solvers._chain_course import Course
from foreplan.solvers._chain_within import Within
from foreplan.solvers.chain_partition import solve
from foreplan.solvers.chain_problem import RELATIVE_TOLERANCE, ChainProblem, FloatArray
from foreplan.solvers.chain_score import ChainAssignment, ChainScore, evaluate
from foreplan.solvers.solution import Solution, SolutionStatus

#: Multipliers tried, one after the other, each four times the last; then halvings of the interval.
_GROWTH, _STEPS, _HALVINGS = 4.0, 7, 4
#: Evaluations of the search for what lies between supported points.
_BETWEEN = 3_000


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Limits in seconds, ``inf`` for none.

    Attributes:
        first_s: on the prefill term: the time to the first token of the whole batch.
        step_s: on the time of one decode step.
    """

    first_s: float = math.inf
    step_s: float = math.inf

    @property
    def none(self) -> bool:
        """Whether there is no limit."""
        return self.first_s == math.inf and self.step_s == math.inf

    def excess(self, problem: ChainProblem, score: ChainScore) -> tuple[float, float]:
        """How far a score is beyond each limit, as a share of it; negative within."""
        return first_s(problem, score) / self.first_s - 1, step_s(problem, score) / self.step_s - 1

    def met(self, problem: ChainProblem, assignment: ChainAssignment) -> bool:
        """Whether an assignment is within both."""
        return max(self.excess(problem, evaluate(problem, assignment))) <= RELATIVE_TOLERANCE


def first_s(problem: ChainProblem, score: ChainScore) -> float:
    """Time to the first token of a batch, by the law."""
    return score.prefill_sum_s + (problem.prefill_microbatches - 1) * score.prefill_max_s


def step_s(problem: ChainProblem, score: ChainScore) -> float:
    """Time of a decode step, by the law; 0 where there is none."""
    if problem.new_tokens == 1:
        return 0.0
    return max(score.decode_sum_s, problem.decode_microbatches * score.decode_max_s)


def least_first_s(problem: ChainProblem, gap: float = 1e-3) -> float:
    """Proven: no assignment has its first tokens sooner; ``inf`` if there is none at all."""
    return soonest_first_s(problem, gap)[0]


def least_step_s(problem: ChainProblem, gap: float = 1e-3) -> float:
    """Proven: no assignment has shorter decode steps; ``inf`` if there is none at all."""
    return soonest_step_s(problem, gap)[0]


def soonest_first_s(problem: ChainProblem, gap: float = 1e-3) -> tuple[float, float]:
    """`least_first_s`, and the soonest first tokens of an assignment that was found."""
    found = solve(_weighed(replace(problem, theta=0.0), 1.0, 0.0), gap=gap)
    return found.lower_bound, found.objective


def soonest_step_s(problem: ChainProblem, gap: float = 1e-3) -> tuple[float, float]:
    """`least_step_s`, and the shortest decode steps of an assignment that was found."""
    if problem.new_tokens == 1:
        return 0.0, 0.0
    found = solve(_weighed(replace(problem, theta=0.0), 0.0, 1.0), gap=gap)
    turns = problem.new_tokens - 1
    return found.lower_bound / turns, found.objective / turns


def solve_within(
    problem: ChainProblem,
    limits: TimeLimits,
    *,
    gap: float = 1e-4,
    cutoff: float = math.inf,
    max_evaluations: int = 20_000,
) -> Solution[ChainAssignment]:
    """The best assignment within limits, and a bound on all within them.

    Args:
        problem: the instance.
        limits: on times.
        gap: as in `solve`.
        cutoff: as in `solve`.
        max_evaluations: as in `solve`, of every call of it.

    Returns:
        As `solve`. Where evaluations end the search, the gap says by how much at most the answer
        may not be the best.
    """
    free = solve(problem, gap=gap, cutoff=cutoff, max_evaluations=max_evaluations)
    if limits.none or free.value is None or limits.met(problem, free.value):
        return free
    search = _Search(problem, limits, gap, max_evaluations, cutoff, free)
    return search.run()


class _Search:
    """Multipliers that grow until the limits are met, and then fall while they still are."""

    def __init__(
        self, problem: ChainProblem, limits: TimeLimits, gap: float, most: int, cutoff: float,
        free: Solution[ChainAssignment],
    ) -> None:  # fmt: skip
        self.problem, self.limits, self.gap, self.most = problem, limits, gap, most
        self.cutoff = cutoff
        self.lower = free.lower_bound
        self.weights, self.closed = (0.0, 0.0), False
        self.evaluations = free.evaluations
        self.best: tuple[float, ChainAssignment] | None = None
        assert free.value is not None
        over = limits.excess(problem, evaluate(problem, free.value))
        self.weighs = (over[0] > RELATIVE_TOLERANCE, over[1] > RELATIVE_TOLERANCE)

    def run(self) -> Solution[ChainAssignment]:
        proven, cutoff = self._impossible(), self.cutoff
        if not proven:
            self._raise_multipliers()
            if not self._done:
                self._search_between()
        found = self.best if self.best is not None and self.best[0] < cutoff else None
        lower = math.inf if proven else self.lower
        if found is not None:
            lower = min(lower, found[0])
            done = self.closed or (found[0] - lower) <= self.gap * abs(found[0])
            status = SolutionStatus.OPTIMAL if done else SolutionStatus.FEASIBLE
        elif proven:
            status = SolutionStatus.INFEASIBLE
        else:
            done = self.closed or self._done
            status = SolutionStatus.CUTOFF if done else SolutionStatus.LIMIT
        return Solution(
            status=status, value=None if found is None else found[1],
            objective=math.inf if found is None else found[0], lower_bound=lower,
            evaluations=self.evaluations, solver="chain box search under time limits",
        )  # fmt: skip

    def _impossible(self) -> bool:
        first, step = self.limits.first_s, self.limits.step_s
        if self.weighs[0] and least_first_s(self.problem, self.gap) > first * (1 + 1e-9):
            return True
        return self.weighs[1] and least_step_s(self.problem, self.gap) > step * (1 + 1e-9)

    def _raise_multipliers(self) -> None:
        low, size = 0.0, 1.0
        for _ in range(_STEPS):
            if self._try(size) or self._done:
                break
            low, size = size, size * _GROWTH
        else:
            return
        for _ in range(_HALVINGS):
            if self._done:
                break
            middle = (low + size) / 2
            low, size = (low, middle) if self._try(middle) else (middle, size)

    @property
    def _done(self) -> bool:
        """Whether nothing that is still to be found would be better by more than the gap."""
        best = math.inf if self.best is None else self.best[0]
        worst = min(best, self.cutoff)
        return worst < math.inf and self.lower >= worst - self.gap * abs(worst)

    def _search_between(self) -> None:
        """The best answer within the limits, supported or not, and its bound."""
        p, limits, (u, w) = self.problem, self.limits, self.weights
        decode = 1 + w / max(p.new_tokens - 1, 1)
        taken_off = self._taken_off(u, w)
        within = Within(
            prefill=1 + u, decode=decode, first_s=limits.first_s, step_s=limits.step_s,
            added_s=taken_off,
        )  # fmt: skip
        known = min(self.cutoff, math.inf if self.best is None else self.best[0])
        # Of the answer itself, which is at least the bound.
        gap = self.gap * self.lower / (self.lower + taken_off) if taken_off else self.gap
        found = Course(
            _weighed(p, 1 + u, decode), gap=gap, cutoff=known + taken_off,
            max_evaluations=min(self.most, _BETWEEN), within=within,
        ).solution()  # fmt: skip
        self.evaluations += found.evaluations
        # Nothing at all, or nothing below what is known.
        self.lower = max(self.lower, min(found.lower_bound - taken_off, known))
        if found.value is not None and limits.met(p, found.value):
            self.best = (evaluate(p, found.value).objective, found.value)
        elif found.value is not None:
            return
        self.closed = found.status in (
            SolutionStatus.OPTIMAL, SolutionStatus.CUTOFF, SolutionStatus.INFEASIBLE
        )  # fmt: skip

    def _taken_off(self, u: float, w: float) -> float:
        """What multipliers take off the weighed objective of what is just within the limits."""
        return (u * self.limits.first_s if u else 0.0) + (w * self.limits.step_s if w else 0.0)

    def _try(self, size: float) -> bool:
        """Solve with multipliers of a size; whether the answer is within the limits."""
        p, limits = self.problem, self.limits
        u = size if self.weighs[0] else 0.0
        w = size * (p.new_tokens - 1) if self.weighs[1] else 0.0
        weighed = _weighed(p, 1 + u, 1 + w / max(p.new_tokens - 1, 1))
        taken_off = self._taken_off(u, w)
        # What is within the limits weighs at most its objective and what is taken off.
        found = solve(
            weighed, gap=self.gap, max_evaluations=self.most, cutoff=self.cutoff + taken_off
        )
        self.evaluations += found.evaluations
        if found.lower_bound - taken_off > self.lower:
            self.lower, self.weights = found.lower_bound - taken_off, (u, w)
        if found.value is None:
            return False
        score = evaluate(p, found.value)
        over = limits.excess(p, score)
        # A limit that was met without weight may be missed with weight on the other.
        self.weighs = (
            self.weighs[0] or over[0] > RELATIVE_TOLERANCE,
            self.weighs[1] or over[1] > RELATIVE_TOLERANCE,
        )
        if max(over) > RELATIVE_TOLERANCE:
            return False
        if self.best is None or score.objective < self.best[0]:
            self.best = (score.objective, found.value)
        return True


def _weighed(problem: ChainProblem, prefill: float, decode: float) -> ChainProblem:
    """The problem with its prefill and decode times multiplied; a weight of 0 drops a phase."""
    changes: dict[str, Any] = {}
    for phase, weight in (("prefill", prefill), ("decode", decode)):
        for name in (f"{phase}_s", f"first_{phase}_s", f"last_{phase}_s", f"link_{phase}_s"):
            changes[name] = _times(getattr(problem, name), weight)
    changes["link_return_decode_s"] = _times(problem.link_return_decode_s, decode)
    return replace(problem, **changes)


def _times(values: FloatArray, weight: float) -> FloatArray:
    # What is impossible stays so at a weight of 0.
    endless = np.isinf(values)
    scaled: FloatArray = np.where(endless, np.inf, np.where(endless, 0.0, values) * weight)
    return scaled
