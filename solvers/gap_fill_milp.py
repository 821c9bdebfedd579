"""The gap-filling problem as a mixed-integer programme: certifies small instances.

Binaries ``y[i,j]`` (slot i on pipeline j), ``x[i,u,g]`` (unit u of slot i in gap g of any pipeline)
and ``o`` (a backward unit first); continuous starts ``s``, ``H`` (head) and ``C`` (end)::

    min  H + C
    sum_j y_ij = 1,  sum_{g of j} x_iug = y_ij                       -> _map
    a_g - M(1 - x) <= s_iu,  s_iu + p <= b_g + M(1 - x)              -> _gaps
    sum_iu p x_iug <= b_g - a_g                                      -> _gaps (implied, tightens)
    s_iu' >= s_iu + p + lag;  end + lag <= F_i;  s >= B_i + lag      -> _chains
    same pipeline, i < k: first unit of k after the last of i        -> _fifo
    same pipeline and resource: forward before backward or after it  -> _directions
    n jobs of j from slot i to slot k, n > cap: EF_k >= EB_i         -> _cap
    s >= -H,  s + p <= C,  C >= T

A forward of slot i and a backward of slot k >= i need no binary: deadlines come before releases.
The head and the tail gap are cut where an incumbent from ``gap_fill.solve`` ends (without one,
where all jobs would end one after another), which bounds M.
Interference makes a unit's time depend on where it lies and is not in this programme.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
import pulp  # type: ignore[import-untyped]

from foreplan.solvers._gap_rows import Rows, refuse_interference
from foreplan.solvers._highs import TOLERANCE, run
from foreplan.solvers.gap_fill import solve
from foreplan.solvers.gap_fill_problem import FloatArray, GapFillProblem, Resource, UnitChain
from foreplan.solvers.gap_fill_score import GapFillAnswer, evaluate
from foreplan.solvers.solution import Solution, SolutionStatus


def solve_milp(
    problem: GapFillProblem, *, gap: float = 1e-7, max_nodes: int = 100_000
) -> Solution[GapFillAnswer]:
    """Solve with HiGHS.

    Args:
        problem: the instance; meant for a few dozen units.
        gap: relative gap to close.
        max_nodes: branch-and-bound nodes.

    Returns:
        The best answer, which the heuristic's own may be; ``evaluations`` is 1.

    Raises:
        SpecError: interference (a slowdown above 1), which this programme does not know.
    """
    refuse_interference(problem)
    known = solve(problem)
    if known.status == SolutionStatus.INFEASIBLE:
        return known
    reach = known.objective - problem.backbone_s
    if not known.found:  # all jobs one after another, before and after
        rows = Rows.of(problem)
        reach = problem.n_slots * float(rows.forward.job_s.max() + rows.backward.job_s.max())
    found, bound, finished = _Programme(problem, reach).solve(gap, max_nodes)
    best, objective = known.value, known.objective
    if found is not None:
        total = evaluate(problem, found).total_s
        if total < objective:
            best, objective = found, total
    lower = min(max(bound, known.lower_bound), objective)
    if best is None:
        status = SolutionStatus.INFEASIBLE if finished else SolutionStatus.LIMIT
        lower = math.inf if finished else known.lower_bound
    else:
        proven = objective - lower <= max(gap, 10 * TOLERANCE) * objective
        status = SolutionStatus.OPTIMAL if proven else SolutionStatus.FEASIBLE
    return Solution(
        status=status, value=best, objective=objective, lower_bound=lower, evaluations=1,
        solver="HiGHS",
    )  # fmt: skip


@dataclass(slots=True)
class _Side:
    """One direction: its chain, lags and variables by slot and unit."""

    chain: UnitChain
    lag: FloatArray
    start: dict[tuple[int, int], pulp.LpVariable]
    x: dict[tuple[int, int, int, int], pulp.LpVariable]
    """By slot, unit, pipeline, gap."""
    length: list[list[pulp.LpAffineExpression]] = field(default_factory=list)


class _Programme:
    def __init__(self, problem: GapFillProblem, reach: float) -> None:
        self.problem = problem
        self.unit = problem.backbone_s
        self.reach = reach / self.unit * (1 + 1e-7) + 1e-7
        self.big = 1.0 + 2 * self.reach
        self.model = pulp.LpProblem("gap_fill", pulp.LpMinimize)
        slots, pipelines = range(problem.n_slots), range(problem.n_pipelines)
        self.y = {
            (i, j): self.model.add_variable(f"y_{i}_{j}", cat=pulp.LpBinary)
            for i in slots
            for j in pipelines
        }
        self.gaps = {
            (j, s, r): self._free(int(problem.stage_device[j, s]), r)
            for j in pipelines
            for s in range(problem.n_stages)
            for r in Resource
        }
        self.sides = [
            self._side("f", problem.forward, problem.forward_lag_s),
            self._side("b", problem.backward, problem.backward_lag_s),
        ]

    def _free(self, device: int, resource: int) -> list[tuple[float, float]]:
        """Gaps of a device's resource within the horizon, in units of T."""
        spans = self.problem.busy_s[device][resource] / self.unit
        spans = spans[spans[:, 1] > spans[:, 0]]
        starts = [-self.reach, *spans[:, 1].tolist()]
        ends = [*spans[:, 0].tolist(), 1.0 + self.reach]
        return [(a, b) for a, b in zip(starts, ends, strict=True) if b > a]

    def _side(self, name: str, chain: UnitChain, lag: FloatArray) -> _Side:
        problem = self.problem
        start, x = {}, {}
        for i in range(problem.n_slots):
            for u in range(len(chain)):
                start[i, u] = self.model.add_variable(
                    f"{name}_{i}_{u}", -self.reach, 1.0 + self.reach
                )
                for j in range(problem.n_pipelines):
                    gaps = self.gaps[j, int(chain.stage[u]), Resource(int(chain.resource[u]))]
                    for g in range(len(gaps)):
                        x[i, u, j, g] = self.model.add_variable(
                            f"x{name}_{i}_{u}_{j}_{g}", cat=pulp.LpBinary
                        )
        side = _Side(chain, lag / self.unit, start, x)
        side.length = [
            [
                pulp.lpSum(
                    float(chain.duration_s[j, u]) / self.unit * self.y[i, j]
                    for j in range(problem.n_pipelines)
                )
                for u in range(len(chain))
            ]
            for i in range(problem.n_slots)
        ]
        return side

    def solve(self, gap: float, max_nodes: int) -> tuple[GapFillAnswer | None, float, bool]:
        """Answer, bound in seconds, and whether HiGHS finished."""
        head = self.model.add_variable("H", 0.0, self.reach)
        end = self.model.add_variable("C", 1.0, 1.0 + self.reach)
        self.model += head + end
        self._map()
        for side in self.sides:
            self._gaps(side)
            self._fifo(side)
            for (i, u), start in side.start.items():
                self.model += start >= -head
                self.model += start + side.length[i][u] <= end
        self._chains()
        self._directions()
        self._cap()
        values, bound, finished = run(self.model, gap, max_nodes)
        if values is None:
            return None, bound * self.unit, finished
        return self._answer(values), bound * self.unit, finished

    def _map(self) -> None:
        for i in range(self.problem.n_slots):
            self.model += pulp.lpSum(self.y[i, j] for j in range(self.problem.n_pipelines)) == 1

    def _gaps(self, side: _Side) -> None:
        chosen: dict[tuple[int, int, int], list[pulp.LpVariable]] = {}
        for (i, u, j, g), x in side.x.items():
            chosen.setdefault((i, u, j), []).append(x)
            row = j, int(side.chain.stage[u]), Resource(int(side.chain.resource[u]))
            a, b = self.gaps[row][g]
            length = float(side.chain.duration_s[j, u]) / self.unit
            if length > b - a + TOLERANCE:
                self.model += x == 0
                continue
            start = side.start[i, u]
            self.model += start >= a - (a + self.reach) * (1 - x)
            self.model += start + length * x <= b + (1.0 + self.reach - b) * (1 - x)
        for (i, _, j), mine in chosen.items():
            self.model += pulp.lpSum(mine) == self.y[i, j]
        if side is self.sides[0]:
            self._capacity()

    def _capacity(self) -> None:
        """What lies in a gap is no longer than the gap."""
        for (j, s, r), gaps in self.gaps.items():
            for g, (a, b) in enumerate(gaps):
                self.model += (
                    pulp.lpSum(
                        float(side.chain.duration_s[j, u]) / self.unit * side.x[i, u, j, g]
                        for side in self.sides
                        for u in range(len(side.chain))
                        if side.chain.stage[u] == s and side.chain.resource[u] == r
                        for i in range(self.problem.n_slots)
                    )
                    <= b - a
                )

    def _chains(self) -> None:
        problem = self.problem
        for side in self.sides:
            for i, u in side.start:
                if u:
                    a, b = sorted((int(side.chain.stage[u - 1]), int(side.chain.stage[u])))
                    done = side.start[i, u - 1] + side.length[i][u - 1]
                    self.model += side.start[i, u] >= done + self._lag(side, i, a, b)
        forward, backward = self.sides
        for i in range(problem.n_slots):
            if len(forward.chain):
                last = len(forward.chain) - 1
                lag = self._lag(forward, i, int(forward.chain.stage[-1]), problem.n_stages)
                done = forward.start[i, last] + forward.length[i][last]
                self.model += done + lag <= float(problem.deadline_s[i]) / self.unit
            if len(backward.chain):
                lag = self._lag(backward, i, int(backward.chain.stage[0]), problem.n_stages)
                self.model += backward.start[i, 0] >= float(problem.release_s[i]) / self.unit + lag

    def _lag(self, side: _Side, i: int, a: int, b: int) -> pulp.LpAffineExpression:
        return pulp.lpSum(
            float(side.lag[j, a:b].sum()) * self.y[i, j] for j in range(self.problem.n_pipelines)
        )

    def _apart(self, i: int, k: int, j: int) -> pulp.LpAffineExpression:
        """A term that frees a row unless both slots are on the pipeline."""
        return self.big * (2 - self.y[i, j] - self.y[k, j])

    def _fifo(self, side: _Side) -> None:
        problem = self.problem
        for s, r in itertools.product(range(problem.n_stages), Resource):
            units = np.flatnonzero((side.chain.stage == s) & (side.chain.resource == r))
            if not len(units):
                continue
            first, last = int(units[0]), int(units[-1])
            for i, k in itertools.combinations(range(problem.n_slots), 2):
                for j in range(problem.n_pipelines):
                    done = side.start[i, last] + side.length[i][last]
                    self.model += side.start[k, first] >= done - self._apart(i, k, j)

    def _directions(self) -> None:
        forward, backward = self.sides
        for (k, u), (i, v) in itertools.product(forward.start, backward.start):
            same = (
                forward.chain.stage[u] == backward.chain.stage[v]
                and forward.chain.resource[u] == backward.chain.resource[v]
            )
            if not same or self.problem.deadline_s[k] <= self.problem.release_s[i]:
                continue
            first = self.model.add_variable(f"o_{k}_{u}_{i}_{v}", cat=pulp.LpBinary)
            for j in range(self.problem.n_pipelines):
                apart = self._apart(i, k, j)
                self.model += (
                    forward.start[k, u]
                    >= backward.start[i, v] + backward.length[i][v] - apart
                    - self.big * (1 - first)
                )  # fmt: skip
                self.model += (
                    backward.start[i, v]
                    >= forward.start[k, u] + forward.length[k][u] - apart - self.big * first
                )

    def _cap(self) -> None:
        problem, cap = self.problem, self.problem.live_cap
        if cap is None:
            return
        forward, backward = self.sides
        last_f, last_b = len(forward.chain) - 1, len(backward.chain) - 1
        for i, k in itertools.combinations(range(problem.n_slots), 2):
            if k - i < cap:
                continue
            for j in range(problem.n_pipelines):
                full = self.model.add_variable(f"l_{i}_{k}_{j}", cat=pulp.LpBinary)
                between = pulp.lpSum(self.y[x, j] for x in range(i, k))
                self.model += between <= cap - 1 + problem.n_slots * full
                self.model += (
                    forward.start[k, last_f] + forward.length[k][last_f]
                    >= backward.start[i, last_b] + backward.length[i][last_b]
                    - self._apart(i, k, j) - self.big * (1 - full)
                )  # fmt: skip

    def _answer(self, values: list[float]) -> GapFillAnswer:
        n, pipelines = self.problem.n_slots, self.problem.n_pipelines
        chosen = np.array(
            [[values[self.y[i, j].index] for j in range(pipelines)] for i in range(n)]
        )
        starts = []
        for side in self.sides:
            table = np.empty((n, len(side.chain)))
            for (i, u), start in side.start.items():
                table[i, u] = values[start.index] * self.unit
            starts.append(table)
        return GapFillAnswer(
            pipeline=chosen.argmax(axis=1), forward_start_s=starts[0], backward_start_s=starts[1]
        )
