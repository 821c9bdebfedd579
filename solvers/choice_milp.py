"""The multiple-choice problem as a mixed-integer programme, solved with HiGHS through PuLP.

Over the variables of the reduction, with binaries ``x[v,a]`` (variable v takes option a), for a
derived variable its options ``y[d,j]``, and ``z[e,a,b]`` for what a pair costs together::

    min  sum values
    sum_a x[v,a] = 1                                                   -> _add_options
    y[d,j] <= h[p],  y[d,j] >= sum_p h[p] - (k-1)   over d's k parents  -> _add_options
    z[e,a,b] >= 0,  sum_b z[e,a,b] <= s[p,a],  sum_a z[e,a,b] <= s[q,b],
    sum_ab z[e,a,b] >= sum_a s[p,a] + sum_b s[q,b] - 1                 -> _add_pair
    weights, scaled, <= limit, for every row that some choice could break  -> _build

``h[p]`` is the sum of the options of parent p that meet the condition. For a pair, options that
cost the same with every partner up to a constant form a class ``s``; one class of each side is the
reference, the cost is then a sum of what each side pays alone and of products of two other
classes. These are the rows of the local polytope without its equalities: ``z`` equals its product
at every integer point whatever the sign of the cost, and no relaxation of one pair is tighter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import highspy
import numpy as np
import pulp  # type: ignore[import-untyped]

from foreplan.errors import SpecError
from foreplan.solvers._choice_reduction import Reduction, Variable, reduce_problem
from foreplan.solvers._highs import optimise
from foreplan.solvers.choice_heap import solve_heap
from foreplan.solvers.choice_problem import Choice, ChoiceProblem, FloatArray
from foreplan.solvers.choice_score import evaluate
from foreplan.solvers.solution import Solution, SolutionStatus

_FEASIBILITY = 5e-10
"""Tolerance of HiGHS on a row scaled to its unit: half of the slack that the evaluator allows."""

_OBJECTIVE_RANGE = 1e3
"""What the largest cost is scaled to, so that HiGHS's absolute tolerances are small to it."""

_ABSOLUTE_GAP = 1e-7
"""Gap at which HiGHS stops, in its own objective: a ten-billionth of the largest cost."""

_MARGIN = 1e-3
"""Share of the room below the cutoff that is added to it before costs are cut."""

_MAX_PASSES = 4
"""Programmes that a solve may need where values differ by many orders of magnitude."""

Terms = dict[int, float]
"""Coefficient of each column; column ``_ONE`` is the constant 1."""

_ONE = -1


def solve_milp(
    problem: ChoiceProblem,
    *,
    start: Choice | None = None,
    gap: float = 1e-9,
    max_nodes: int = 100_000,
    time_limit_s: float = math.inf,
) -> Solution[Choice]:
    """Solve to a proven gap; never worse than the heap.

    Args:
        problem: the instance.
        start: a feasible choice that the heap starts from; left out: it looks for one.
        gap: relative gap at which to stop.
        max_nodes: branch-and-bound nodes, the deterministic limit.
        time_limit_s: seconds for HiGHS in all; an answer that met it depends on the machine.

    Returns:
        The better of heap and programme; ``optimal`` only if the gap is proven; ``evaluations``
        counts branch-and-bound nodes.

    Raises:
        SpecError: ``start`` is no feasible choice; a gap or limit that is no limit.
    """
    if not (0 <= gap < math.inf and max_nodes >= 0 and time_limit_s >= 0):
        raise SpecError(
            "solve_milp", got=(gap, max_nodes, time_limit_s), expected="a gap and limits >= 0"
        )
    warm = solve_heap(problem, start)
    reduction = reduce_problem(problem)
    best, objective, lower = warm.value, warm.objective, reduction.least_value()
    nodes, left_s, finished = 0, time_limit_s, False
    for _ in range(_MAX_PASSES):
        options = None if best is None else reduction.options(best)
        programme = _Programme(reduction, start=options, cutoff=objective)
        answer = programme.solve(gap, max_nodes - nodes, left_s)
        nodes, finished = nodes + answer.nodes, answer.finished
        left_s = max(left_s - answer.seconds, 0.0)
        if finished and answer.options is None and best is None:
            return _nothing(SolutionStatus.INFEASIBLE, nodes)
        if answer.lower_bound < math.inf:
            # Else rows are met by the evaluator's slack alone: HiGHS proved nothing about them.
            lower = max(lower, answer.lower_bound)
        before = objective
        if answer.options is not None:
            found = reduction.choice(answer.options)
            score = evaluate(problem, found)
            if score.feasible and score.objective < objective:
                best, objective = found, score.objective
        # HiGHS's tolerances are relative to the costs that can still matter: a far better choice
        # leaves smaller ones, which a second look can tell apart.
        proven = objective - lower <= gap * abs(objective)
        if proven or not finished or objective >= before or nodes >= max_nodes:
            break
    if best is None:
        return _nothing(SolutionStatus.LIMIT, nodes, lower)
    proven = objective - lower <= max(gap * abs(objective), programme.tolerance)
    optimal = finished and proven
    return Solution(
        status=SolutionStatus.OPTIMAL if optimal else SolutionStatus.FEASIBLE,
        value=best,
        objective=objective,
        lower_bound=min(lower, objective),
        evaluations=nodes,
        solver=_SOLVER,
        message="" if optimal else "a limit came before the gap was closed",
    )


def _nothing(status: SolutionStatus, nodes: int, lower_bound: float = math.inf) -> Solution[Choice]:
    return Solution(
        status=status,
        value=None,
        objective=math.inf,
        lower_bound=lower_bound,
        evaluations=nodes,
        solver=_SOLVER,
        message="no choice meets every row" if status == SolutionStatus.INFEASIBLE else "",
    )


def least_excess(
    problem: ChoiceProblem, *, max_nodes: int = 100_000
) -> tuple[Choice | None, float]:
    """The choice whose most broken row is broken least.

    Args:
        problem: the instance, usually an infeasible one.
        max_nodes: branch-and-bound nodes.

    Returns:
        The choice found (``None`` if a limit came first) and a proven lower bound on the largest
        excess over a limit, in each row's unit (``problem.row_units``); 0 if nothing has to break.
    """
    reduction = reduce_problem(problem)
    answer = _Programme(reduction, elastic=True).solve(1e-6, max_nodes, math.inf)
    choice = None if answer.options is None else reduction.choice(answer.options)
    return choice, max(answer.lower_bound, 0.0)


_SOLVER = "HiGHS, warm-started by the heap"


@dataclass(frozen=True, slots=True)
class _Answer:
    """Options of the incumbent, proven bound, and whether HiGHS came to its end."""

    options: list[int] | None
    lower_bound: float
    finished: bool
    nodes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Programme:
    """Columns and rows; a literal is a linear expression that is 1 if something is chosen.

    Attributes:
        reduction: the variables.
        elastic: minimise the largest excess of a row, in its unit, instead of the objective.
        start: options of a feasible choice for HiGHS to begin with.
        cutoff: its objective. Costs that exceed it by themselves are cut to just above, which
            changes no choice that is better and keeps the numbers of the programme comparable.
        unit: of HiGHS's objective.
        constant: part of the objective that HiGHS does not see.
    """

    reduction: Reduction
    elastic: bool = False
    start: list[int] | None = None
    cutoff: float = math.inf
    unit: float = 1.0
    constant: float = 0.0
    _model: pulp.LpProblem = field(init=False)
    _columns: list[pulp.LpVariable] = field(default_factory=list)
    _starts: list[float] = field(default_factory=list)
    _charges: list[FloatArray] = field(default_factory=list)
    _literals: list[list[Terms]] = field(default_factory=list)

    @property
    def tolerance(self) -> float:
        """Difference of objectives that HiGHS cannot tell apart."""
        return 10 * _ABSOLUTE_GAP * self.unit

    def solve(self, gap: float, max_nodes: int, limit_s: float) -> _Answer:
        """Build the programme and run HiGHS on it."""
        self._model = pulp.LpProblem("choice", pulp.LpMinimize)
        self._build()
        if not self._columns:
            held = not self.reduction.scarce_rows()
            return _Answer([] if held else None, self.constant if held else math.inf, True)
        starts = {} if self.start is None else dict(zip(self._columns, self._starts, strict=True))
        highs = optimise(
            self._model, gap=gap, max_nodes=max_nodes, absolute_gap=_ABSOLUTE_GAP, limit_s=limit_s,
            tolerance=_FEASIBILITY, smallest=1e-12, starts=starts,
        )  # fmt: skip
        info, status = highs.getInfo(), highs.getModelStatus()
        nodes, seconds = max(int(info.mip_node_count), 0), float(highs.getRunTime())
        kinds = highspy.HighsModelStatus
        if status in (kinds.kInfeasible, kinds.kUnboundedOrInfeasible):
            return _Answer(None, math.inf, True, nodes, seconds)
        bound = float(info.mip_dual_bound) * self.unit + self.constant
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return _Answer(None, bound, False, nodes, seconds)
        found = highs.getSolution().col_value
        values = [*(found[column.index] for column in self._columns), 1.0]  # and column _ONE
        options = [
            max(
                range(len(literals)),
                key=lambda a: sum(f * values[c] for c, f in literals[a].items()),
            )
            for literals in self._literals
        ]
        self.reduction.derive(options)
        return _Answer(options, bound, status == kinds.kOptimal, nodes, seconds)

    def _build(self) -> None:
        """Columns and rows of the whole programme."""
        reduction, problem = self.reduction, self.reduction.problem
        scarce = reduction.scarce_rows()
        # Column 0 of every cost is the objective, the others are the scarce rows in their units.
        scale = np.concatenate([[1.0], 1 / problem.row_units[scarce]])

        # A value this much above its least leads to no better choice, whatever else is chosen.
        room = max(self.cutoff - reduction.least_value(), 0.0) * (1 + _MARGIN)

        def costs(values: FloatArray, weights: FloatArray) -> FloatArray:
            values = np.minimum(values, values.min() + room)
            cost: FloatArray = np.concatenate([values[..., None], weights[..., scarce]], axis=-1)
            cost *= scale
            return cost

        self._charges = [costs(np.array(reduction.base_value), reduction.base)]
        for v, variable in enumerate(reduction.variables):
            self._add_options(v, variable)
            for literal, cost in zip(
                self._literals[v], costs(variable.values, variable.weights), strict=True
            ):
                self._charge(literal, cost)
        for (p, q), (values, weights) in reduction.pairs.items():
            self._add_pair(p, q, costs(values, weights))
        rooms = problem.limits[scarce] * scale[1:]
        totals = np.array(self._charges)
        if self.elastic:
            excess = self._column("excess", 0.0, integer=False, upper=None)
            totals = np.vstack([totals, np.full(totals.shape[1], -1.0)])
            totals[:, 0] = 0.0
            totals[1 + excess, 0] = 1.0
        for k, room in enumerate(rooms, 1):
            self._row(dict(enumerate(totals[:, k], -1)), pulp.LpConstraintLE, room)
        self.unit = float(np.abs(totals[1:, 0]).max(initial=0.0)) / _OBJECTIVE_RANGE or 1.0
        self.constant = float(totals[0, 0])
        # PuLP only knows columns that stand somewhere: those that cost nothing stand here.
        self._model.setObjective(
            pulp.LpAffineExpression(
                {self._columns[c]: f / self.unit for c, f in enumerate(totals[1:, 0])}
            )
        )

    def _add_options(self, v: int, variable: Variable) -> None:
        """Literals of a variable's options, and what ties them to each other or to the parents."""
        m = variable.n_options
        chosen = None if self.start is None else self.start[v]
        free = not variable.conditions
        # With two options one binary does; a derived variable's option 0 is what is left over.
        first = 0 if free and m > 2 else 1
        columns = [
            self._column(f"x_{v}_{a}", float(chosen == a), integer=free) for a in range(first, m)
        ]
        literals: list[Terms] = [{c: 1.0} for c in columns]
        if first:
            self._literals.append([{_ONE: 1.0, **dict.fromkeys(columns, -1.0)}, *literals])
        else:
            self._literals.append(literals)
            self._row(dict.fromkeys(columns, 1.0), pulp.LpConstraintEQ, 1.0)
        for column, condition in zip(columns, variable.conditions, strict=free is False):
            total: Terms = {column: 1.0, _ONE: len(condition) - 1.0}
            for p, accepted in condition:
                met = _sum(self._literals[p][a] for a, here in enumerate(accepted) if here)
                self._row(_sum([{column: 1.0}, met], [1.0, -1.0]), pulp.LpConstraintLE, 0.0)
                total = _sum([total, met], [1.0, -1.0])
            self._row(total, pulp.LpConstraintGE, 0.0)

    def _add_pair(self, p: int, q: int, cost: FloatArray) -> None:
        """Charge ``cost[a, b]`` for each pair of options."""
        alone = cost[:, :1] - cost[:1, :1]
        together = cost - alone - cost[:1]
        for literal, amount in zip(self._literals[p], alone[:, 0], strict=True):
            self._charge(literal, amount)
        for literal, amount in zip(self._literals[q], cost[0], strict=True):
            self._charge(literal, amount)
        size = np.abs(cost).max(axis=(0, 1))
        shape = np.round(together / np.where(size > 0, size, 1.0), 12)
        rows, columns = _classes(shape), _classes(shape.transpose(1, 0, 2))
        if not rows or not columns:
            return
        side_p = [_sum(self._literals[p][a] for a in members) for members in rows]
        side_q = [_sum(self._literals[q][b] for b in members) for members in columns]
        z = np.empty((len(rows), len(columns)), dtype=int)
        for i, a in enumerate(rows):
            for j, b in enumerate(columns):
                both = self.start is not None and self.start[p] in a and self.start[q] in b
                z[i, j] = self._column(f"z_{p}_{q}_{i}_{j}", float(both), integer=False)
                self._charge({int(z[i, j]): 1.0}, together[a[0], b[0]])
        for literal, parts in zip([*side_p, *side_q], [*z, *z.T], strict=True):
            whole = dict.fromkeys(map(int, parts), 1.0)
            self._row(_sum([whole, literal], [1.0, -1.0]), pulp.LpConstraintLE, 0.0)
        whole = dict.fromkeys(map(int, z.ravel()), 1.0)
        least = _sum([whole, *side_p, *side_q], [1.0] + [-1.0] * (len(side_p) + len(side_q)))
        self._row(least, pulp.LpConstraintGE, -1.0)

    def _column(self, name: str, start: float, *, integer: bool, upper: float | None = 1.0) -> int:
        category = pulp.LpInteger if integer else pulp.LpContinuous
        self._columns.append(self._model.add_variable(name, 0.0, upper, category))
        self._starts.append(start)
        self._charges.append(np.zeros_like(self._charges[0]))
        return len(self._columns) - 1

    def _charge(self, literal: Terms, amount: FloatArray) -> None:
        for column, factor in literal.items():
            self._charges[column + 1] += factor * amount

    def _row(self, terms: Terms, sense: int, right: float) -> None:
        right -= terms.get(_ONE, 0.0)
        left = pulp.LpAffineExpression(
            {self._columns[c]: float(f) for c, f in terms.items() if c != _ONE and f}
        )
        self._model.addConstraint(pulp.LpConstraint(left, sense, rhs=float(right)))


def _sum(parts: Iterable[Terms], factors: Iterable[float] | None = None) -> Terms:
    """Sum of linear expressions."""
    total: Terms = {}
    for part, factor in zip(parts, factors or itertools.repeat(1.0), strict=False):
        for column, coefficient in part.items():
            total[column] = total.get(column, 0.0) + factor * coefficient
    return total


def _classes(together: FloatArray) -> list[list[int]]:
    """First-axis indices that cost the same with every partner, without those that cost nothing."""
    classes: dict[bytes, list[int]] = {}
    for a, cost in enumerate(together):
        if cost.any():
            classes.setdefault((cost + 0.0).tobytes(), []).append(a)
    return list(classes.values())
