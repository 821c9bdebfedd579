"""The multiple-choice problem by dynamic programming over a narrow frontier, without a MILP solver.

Variables are decided one after the other. A variable stays *live* until everything that it shares
a cost or a cascade with is decided; a label is what has been spent so far (objective and every row
that can break) at one combination of options of the live variables. Two prunings keep it exact:

- a label is dropped if another one with the same live options is no worse in every component;
- a label is dropped if, with the least that the rest can add, a row breaks or a known choice is
  not beaten.

Networks are mostly chains of small series-parallel blocks, so few variables are live at a time;
labels grow with the number of rows whose budgets pull in different directions. An independent
check of ``choice_milp`` for few rows, not its replacement for many.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from foreplan.errors import SpecError
from foreplan.solvers._choice_reduction import Reduction, reduce_problem
from foreplan.solvers._stage_labels import undominated
from foreplan.solvers.choice_problem import Choice, ChoiceProblem, FloatArray, IntArray
from foreplan.solvers.choice_score import evaluate
from foreplan.solvers.solution import Solution, SolutionStatus

SmallInts = npt.NDArray[np.int16]


def solve_frontier(
    problem: ChoiceProblem,
    *,
    start: Choice | None = None,
    max_states: int = 10_000,
    max_labels: int = 1_000_000,
) -> Solution[Choice]:
    """Solve exactly by labels.

    Args:
        problem: the instance.
        start: a feasible choice whose objective prunes; it is the answer if nothing beats it.
        max_states: combinations of live options beyond which the problem is refused.
        max_labels: labels of one step at which to stop.

    Returns:
        Status ``optimal`` or ``infeasible``; after ``max_labels`` ``feasible`` (the start) or
        ``limit``, with the bound of the labels at hand; ``evaluations`` counts labels.

    Raises:
        SpecError: the frontier is too wide, or ``start`` is no feasible choice.
    """
    best, objective = start, math.inf
    if start is not None:
        score = evaluate(problem, start)
        if not score.feasible:
            raise SpecError("start", got=score.violations[0], expected="a feasible choice")
        objective = score.objective
    reduction = reduce_problem(problem)
    width, order = min(_greedy_order(reduction), _given_order(reduction), key=lambda o: o[0])
    if width > max_states:
        raise SpecError(
            "frontier",
            got=f"{width} combinations of live options",
            expected=f"at most {max_states}",
            fix="use solve_milp, which does not depend on the order of the graph",
        )
    sweep = _Sweep(reduction, order, objective)
    for step in range(len(order)):
        if not sweep.advance(step, max_labels):
            status = SolutionStatus.LIMIT if best is None else SolutionStatus.FEASIBLE
            return Solution(
                status=status,
                value=best,
                objective=objective,
                lower_bound=min(sweep.lower_bound(step), objective),
                evaluations=sweep.labels,
                solver=_SOLVER,
                message=f"more than {max_labels} labels after {step} of {len(order)} variables",
            )
    options = sweep.best_options()
    if options is not None:
        best = reduction.choice(options)
        objective = evaluate(problem, best).objective
    return Solution(
        status=SolutionStatus.INFEASIBLE if best is None else SolutionStatus.OPTIMAL,
        value=best,
        objective=objective,
        lower_bound=objective,
        evaluations=sweep.labels,
        solver=_SOLVER,
        message="no choice meets every row" if best is None else "",
    )


_SOLVER = "frontier dynamic programme"


def _neighbours(reduction: Reduction) -> list[set[int]]:
    """Variables that each one shares a pair or a cascade with."""
    near: list[set[int]] = [set() for _ in reduction.variables]
    cascades = [(*v.parents, d) for d, v in enumerate(reduction.variables) if v.conditions]
    for scope in (*reduction.pairs, *cascades):
        for v in scope:
            near[v].update(u for u in scope if u != v)
    return near


def _given_order(reduction: Reduction) -> tuple[int, list[int]]:
    """Most combinations of live options along the given order, and the order."""
    order = list(range(len(reduction.variables)))
    near, live, widest = _neighbours(reduction), list[int](), 1
    for v in order:
        live.append(v)
        widest = max(widest, _combinations(reduction, live))
        live = [u for u in live if max(near[u], default=-1) > v]
    return widest, order


def _greedy_order(reduction: Reduction) -> tuple[int, list[int]]:
    """The same for an order that keeps the frontier narrow: next, what leaves fewest live."""
    near = _neighbours(reduction)
    waiting = [set(others) for others in near]
    left, live, order, widest = set(range(len(near))), set[int](), list[int](), 1
    while left:
        candidates = sorted({u for v in live for u in near[v] if u in left} or {min(left)})
        sizes = [
            _combinations(reduction, [u for u in (*live, v) if waiting[u] - {v}])
            for v in candidates
        ]
        v = candidates[sizes.index(min(sizes))]
        left.remove(v)
        order.append(v)
        live.add(v)
        widest = max(widest, _combinations(reduction, live))
        for u in near[v]:
            waiting[u].discard(v)
        live = {u for u in live if waiting[u]}
    return widest, order


def _combinations(reduction: Reduction, live: Iterable[int]) -> int:
    return math.prod(reduction.variables[u].n_options for u in live)


@dataclass(slots=True)
class _Sweep:
    """Labels after each variable of an order.

    Attributes:
        reduction: the variables.
        order: in which they are decided.
        cutoff: objective that has to be beaten.
        labels: how many were made.
    """

    reduction: Reduction
    order: list[int]
    cutoff: float
    labels: int = 0
    _scarce: list[int] = field(init=False)
    _most: FloatArray = field(init=False)
    _spent: FloatArray = field(init=False)
    _live: list[int] = field(default_factory=list)
    _options: SmallInts = field(init=False)
    _rest: FloatArray = field(init=False)
    _last_use: dict[int, int] = field(init=False)
    _pairs: list[list[tuple[int, int]]] = field(init=False)
    _cascades: list[list[int]] = field(init=False)
    _trail: list[tuple[IntArray, SmallInts]] = field(default_factory=list)

    def __post_init__(self) -> None:
        reduction, problem, n = self.reduction, self.reduction.problem, len(self.order)
        self._scarce = reduction.scarce_rows()
        self._most = np.concatenate([[math.inf], problem.slack_limits[self._scarce]])
        at = {v: step for step, v in enumerate(self.order)}
        self._last_use = {
            v: max([at[v], *(at[u] for u in near)]) for v, near in enumerate(_neighbours(reduction))
        }
        self._pairs, self._cascades = [[] for _ in range(n)], [[] for _ in range(n)]
        added = np.zeros((n + 1, 1 + len(self._scarce)))
        for v, variable in enumerate(reduction.variables):
            added[at[v]] += self._costs(variable.values, variable.weights).min(axis=0)
            if variable.conditions:
                self._cascades[max(at[u] for u in (*variable.parents, v))].append(v)
        for (p, q), tables in reduction.pairs.items():
            step = max(at[p], at[q])
            added[step] += self._costs(*tables).min(axis=(0, 1))
            self._pairs[step].append((p, q))
        # From step s on, what is left adds at least the sum of what each step adds.
        self._rest = np.cumsum(added[::-1], axis=0)[::-1]
        self._options = np.zeros((1, 0), dtype=np.int16)
        self._spent = self._costs(np.array(reduction.base_value), reduction.base)[None]
        self._spent = self._spent[self._promising(self._spent, 0)]
        self._options = self._options[: len(self._spent)]

    def _promising(self, spent: FloatArray, step: int) -> npt.NDArray[np.bool_]:
        """Labels that can still meet every row and beat the cutoff with steps from ``step`` on."""
        least = spent + self._rest[step]
        kept: npt.NDArray[np.bool_] = (least <= self._most).all(axis=1)
        kept &= least[:, 0] < self.cutoff
        return kept

    def _costs(self, values: FloatArray, weights: FloatArray) -> FloatArray:
        """Objective and scarce rows along the last axis."""
        return np.concatenate([values[..., None], weights[..., self._scarce]], axis=-1)

    def advance(self, step: int, max_labels: int) -> bool:
        """Decide one more variable; false, with nothing done, if that needs too many labels."""
        reduction, v = self.reduction, self.order[step]
        variable = reduction.variables[v]
        n, m = len(self._spent), variable.n_options
        if n * m > max_labels:
            return False
        self.labels += n * m
        before = np.repeat(np.arange(n), m)
        option = np.tile(np.arange(m, dtype=np.int16), n)
        live, options = [*self._live, v], np.column_stack([self._options[before], option])
        column = {u: options[:, c] for c, u in enumerate(live)}
        spent = self._spent[before] + self._costs(variable.values, variable.weights)[option]
        for p, q in self._pairs[step]:
            spent += self._costs(*reduction.pairs[p, q])[column[p], column[q]]
        kept = self._promising(spent, step + 1)
        for d in self._cascades[step]:
            kept &= self._derived(d, column) == column[d]
        remaining = [c for c, u in enumerate(live) if self._last_use[u] > step]
        index = np.flatnonzero(kept)
        options = options[:, remaining]
        index = index[_pareto(options[index], spent[index])]
        self._live = [live[c] for c in remaining]
        self._options, self._spent = options[index], spent[index]
        self._trail.append((before[index], option[index]))
        return True

    def _derived(self, d: int, column: dict[int, SmallInts]) -> IntArray:
        """What the cascade makes of a variable, for every label."""
        taken = np.zeros(len(column[d]), dtype=np.int64)
        for j, condition in enumerate(self.reduction.variables[d].conditions, 1):
            met = np.ones(len(taken), dtype=bool)
            for p, accepted in condition:
                met &= np.array(accepted)[column[p]]
            taken[met] = j
        return taken

    def lower_bound(self, step: int) -> float:
        """Least objective that the labels before a step can still lead to."""
        return float((self._spent[:, 0] + self._rest[step, 0]).min(initial=math.inf))

    def best_options(self) -> list[int] | None:
        """Option of every variable in the best label, ``None`` if there is no label."""
        if not len(self._spent):
            return None
        options = [0] * len(self.order)
        at = int(self._spent[:, 0].argmin())
        for v, (before, option) in zip(reversed(self.order), reversed(self._trail), strict=True):
            options[v] = int(option[at])
            at = int(before[at])
        return options


def _pareto(options: SmallInts, spent: FloatArray) -> IntArray:
    """Indices of labels that no label with the same live options beats in every component."""
    if not len(spent):
        return np.empty(0, dtype=np.int64)
    _, state = np.unique(options, axis=0, return_inverse=True)
    by_state = np.argsort(state.ravel(), kind="stable")
    cuts = np.flatnonzero(np.diff(state.ravel()[by_state])) + 1
    return np.concatenate(
        [members[undominated(spent[members])] for members in np.split(by_state, cuts)]
    )
