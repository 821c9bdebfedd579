"""The chain problem as a mixed-integer programme: an independent check of ``chain_partition``.

For one order of types ``k(0), ..., k(S-1)``, every stage non-empty, with binaries ``z[i,j,v]``
(layer i on stage j at variant v) and continuous ``P*, D*, R``::

    min  sum_j P_j + (Mp-1) P* + (n-1) R + theta sum omega_iv z_ijv
    sum_jv z_ijv = 1                                          -> _one_place_each
    U_ij >= U_i+1,j,  U_ij = sum_j'<=j,v z_ij'v               -> _contiguous
    z on stage 0 for layer 0, on stage S-1 for layer L-1, and at least one layer a stage
                                                              -> _contiguous
    sum_iv M_iv z_ijv + edges <= capacity_k(j)                -> _memory
    ... + W_rn (r_jr + n_jn - 1) <= capacity_k(j), r_jr >= z_ijv of need r, sum_n n n_jn = sum z
                                                              -> _workspace
    P* >= P_j, P* >= hops;  D* >= D_j, D* >= hops             -> _bottlenecks
    R >= sum_j D_j + hops,  R >= m D*                         -> _bottlenecks
    sum omega z <= max_omega,  sum cost2 z <= max_cost2       -> _budgets

The cumulative form of contiguity is O(L S) rows and tighter than pairwise exclusions. Orders are
looped over outside (``solve_milp``), each with a row that asks for better than the incumbent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pulp  # type: ignore[import-untyped]

from foreplan.errors import SpecError
from foreplan.solvers._highs import TOLERANCE, run
from foreplan.solvers.chain_problem import ChainProblem, FloatArray
from foreplan.solvers.chain_score import ChainAssignment, evaluate, make_stage
from foreplan.solvers.enumerate import type_sequences
from foreplan.solvers.solution import Solution, SolutionStatus


def solve_milp(
    problem: ChainProblem,
    *,
    orders: Iterable[tuple[int, ...]] | None = None,
    gap: float = 1e-9,
    max_nodes: int = 100_000,
) -> Solution[ChainAssignment]:
    """Solve one programme an order of types with HiGHS and keep the best.

    Args:
        problem: the instance; meant for small ones.
        orders: type of each stage, for each order; default all that the counts allow.
        gap: relative gap of each programme.
        max_nodes: branch-and-bound nodes of each programme.

    Returns:
        The best over the given orders; ``evaluations`` counts programmes.

    Raises:
        SpecError: an order uses more devices than there are, or more than layers.
    """
    best: ChainAssignment | None = None
    objective, lower, programmes, complete = math.inf, math.inf, 0, True
    for order in type_sequences(problem) if orders is None else orders:
        used = np.bincount(order, minlength=problem.n_types)
        if len(order) > problem.n_layers or (used > problem.counts).any():
            raise SpecError(
                "orders", got=order, expected="at most the devices and layers there are"
            )
        programmes += 1
        found, bound, finished = _Programme(problem, order).solve(objective, gap, max_nodes)
        complete = complete and finished
        lower = min(lower, bound)
        if found is not None:
            score = evaluate(problem, found)
            if score.feasible and score.objective < objective:
                best, objective = found, score.objective
    if best is not None:
        proven = objective - lower <= max(gap, TOLERANCE) * 10 * abs(objective)
        status = SolutionStatus.OPTIMAL if complete and proven else SolutionStatus.FEASIBLE
    else:
        status = SolutionStatus.INFEASIBLE if complete else SolutionStatus.LIMIT
    return Solution(
        status=status,
        value=best,
        objective=objective,
        lower_bound=min(lower, objective),
        evaluations=programmes,
        solver="HiGHS, one programme an order",
    )


@dataclass(slots=True)
class _Programme:
    """The programme of one order; times are in units of the longest layer."""

    problem: ChainProblem
    order: tuple[int, ...]

    def solve(
        self, cutoff: float, gap: float, max_nodes: int
    ) -> tuple[ChainAssignment | None, float, bool]:
        """Best assignment below the cutoff, bound in seconds, and whether HiGHS finished."""
        problem, stages = self.problem, range(len(self.order))
        blank = (None, math.inf, True)
        p_hops, d_hops, back = self._hops()
        if not all(map(math.isfinite, (*p_hops, *d_hops, *back))):
            return blank
        layers, variants = range(problem.n_layers), range(problem.n_variants)
        times = problem.prefill_s[problem.available], problem.decode_s[problem.available]
        unit = max([float(t.max(initial=0.0)) for t in times]) or 1.0
        model = pulp.LpProblem("chain", pulp.LpMinimize)
        z = {
            (i, j, v): model.add_variable(f"z_{i}_{j}_{v}", cat=pulp.LpBinary)
            for i, j, v in itertools.product(layers, stages, variants)
            if problem.available[self.order[j], i, v]
        }
        if any(not any((i, j, v) in z for j in stages for v in variants) for i in layers):
            return blank
        prefill = self._stage_sums(z, problem.prefill_s / unit, "prefill_s", unit)
        decode = self._stage_sums(z, problem.decode_s / unit, "decode_s", unit)
        if prefill is None or decode is None:
            return blank
        top_p, top_d, turn = (model.add_variable(name, lowBound=0) for name in ("P", "D", "R"))
        theta = problem.theta / unit
        objective = pulp.lpSum(
            [*prefill, (problem.prefill_microbatches - 1) * top_p, (problem.new_tokens - 1) * turn]
        ) + pulp.lpSum(theta * float(problem.omega[i, v]) * var for (i, _, v), var in z.items())
        objective += sum(p_hops) / unit
        model += objective
        if cutoff < math.inf:
            model += objective <= cutoff / unit * (1 - gap)
        self._one_place_each(model, z)
        self._contiguous(model, z)
        if not self._memory(model, z):
            return blank
        m = problem.decode_microbatches
        for top, sums, hops in ((top_p, prefill, p_hops), (top_d, decode, [*d_hops, *back])):
            self._bottlenecks(model, top, sums, [hop / unit for hop in hops])
        model += turn >= pulp.lpSum(decode) + (sum(d_hops) + sum(back)) / unit
        model += turn >= m * top_d
        self._budgets(model, z)
        values, bound, finished = run(model, gap, max_nodes)
        constant = float(objective.constant)
        # Below the cutoff row nothing may exist: then the cutoff is the bound.
        bound = min((bound + constant) * unit, cutoff)
        if values is None:
            return None, bound, finished
        return self._assignment(z, values), bound, finished

    def _hops(self) -> tuple[list[float], list[float], list[float]]:
        problem, order = self.problem, self.order
        pairs = list(itertools.pairwise(order))
        prefill = [float(problem.link_prefill_s[pair]) for pair in pairs]
        decode = [float(problem.link_decode_s[pair]) for pair in pairs]
        back = [float(problem.link_return_decode_s[order[-1], order[0]])] if pairs else []
        return prefill, decode, back

    def _edges(self, quantity: str, unit: float) -> list[float]:
        """Extras of each stage: first on stage 0, last on stage S-1."""
        extras = [0.0] * len(self.order)
        extras[0] += float(getattr(self.problem, f"first_{quantity}")[self.order[0]]) / unit
        extras[-1] += float(getattr(self.problem, f"last_{quantity}")[self.order[-1]]) / unit
        return extras

    def _stage_sums(
        self,
        z: dict[tuple[int, int, int], pulp.LpVariable],
        layer: FloatArray,
        quantity: str,
        unit: float,
    ) -> list[pulp.LpAffineExpression] | None:
        extras = self._edges(quantity, unit)
        if not all(map(math.isfinite, extras)):
            return None
        return [
            pulp.lpSum(float(layer[k, i, v]) * var for (i, at, v), var in z.items() if at == j)
            + extras[j]
            for j, k in enumerate(self.order)
        ]

    def _one_place_each(
        self, model: pulp.LpProblem, z: dict[tuple[int, int, int], pulp.LpVariable]
    ) -> None:
        for i in range(self.problem.n_layers):
            model += pulp.lpSum(var for (at, _, _), var in z.items() if at == i) == 1

    def _contiguous(
        self, model: pulp.LpProblem, z: dict[tuple[int, int, int], pulp.LpVariable]
    ) -> None:
        n_layers, n_stages = self.problem.n_layers, len(self.order)
        up_to = [
            [
                pulp.lpSum(var for (at, s, _), var in z.items() if at == i and s <= j)
                for j in range(n_stages)
            ]
            for i in range(n_layers)
        ]
        for j in range(n_stages - 1):
            for i in range(n_layers - 1):
                model += up_to[i][j] >= up_to[i + 1][j]
        for j in range(n_stages):
            model += pulp.lpSum(var for (_, s, _), var in z.items() if s == j) >= 1
        model += up_to[0][0] == 1
        if n_stages > 1:
            model += up_to[n_layers - 1][n_stages - 2] == 0

    def _memory(
        self, model: pulp.LpProblem, z: dict[tuple[int, int, int], pulp.LpVariable]
    ) -> bool:
        """Capacity rows; false if one cannot hold whatever is chosen."""
        problem = self.problem
        extras = self._edges("memory_bytes", 1.0)
        for j, k in enumerate(self.order):
            place = int(j == 0) + 2 * int(j == len(self.order) - 1)
            once = problem.workspace_bytes[k, :, place]
            always = problem.fixed_memory_bytes[k] + once.min()
            room = float(problem.capacity_limit_bytes[k] - always) - extras[j]
            if math.isnan(room) or room < 0:
                return False
            if room == math.inf:
                continue
            scale = room or 1.0
            need = pulp.lpSum(
                float(problem.memory_bytes[k, i, v]) / scale * var
                for (i, s, v), var in z.items()
                if s == j
            )
            model += need <= room / scale
            if (once > once.min()).any():
                self._workspace(model, z, j, need, room / scale, (once - once.min()) / scale)
        return True

    def _workspace(
        self,
        model: pulp.LpProblem,
        z: dict[tuple[int, int, int], pulp.LpVariable],
        j: int,
        need: pulp.LpAffineExpression,
        room: float,
        more: FloatArray,
    ) -> None:
        """Room for what a stage of ``n`` layers needs once, ``more [R, L]`` than the least."""
        mine = {(i, v): var for (i, s, v), var in z.items() if s == j}
        long = [
            model.add_variable(f"n_{j}_{n}", cat=pulp.LpBinary) for n in range(1, more.shape[1] + 1)
        ]
        model += pulp.lpSum(long) == 1
        layers = pulp.lpSum((n + 1) * var for n, var in enumerate(long))
        model += layers == pulp.lpSum(mine.values())
        for r in range(len(more)):
            used = model.add_variable(f"r_{j}_{r}", lowBound=0, upBound=1)
            for (i, v), var in mine.items():
                if self.problem.needs[i, v] == r:
                    model += used >= var
            for n, of_length in enumerate(long):
                if more[r, n] > 0:
                    model += need + float(more[r, n]) * (used + of_length - 1) <= room

    def _bottlenecks(
        self,
        model: pulp.LpProblem,
        top: pulp.LpVariable,
        sums: list[pulp.LpAffineExpression],
        hops: list[float],
    ) -> None:
        for stage in sums:
            model += top >= stage
        for hop in hops:
            model += top >= hop

    def _budgets(
        self, model: pulp.LpProblem, z: dict[tuple[int, int, int], pulp.LpVariable]
    ) -> None:
        problem = self.problem
        for cost, limit in (
            (problem.omega, problem.omega_limit),
            (problem.cost2, problem.cost2_limit),
        ):
            if limit < math.inf:
                scale = max(abs(limit), float(np.abs(cost).max())) or 1.0
                total = pulp.lpSum(float(cost[i, v]) / scale * var for (i, _, v), var in z.items())
                model += total <= limit / scale

    def _assignment(
        self, z: dict[tuple[int, int, int], pulp.LpVariable], values: list[float]
    ) -> ChainAssignment:
        chosen = sorted(key for key, var in z.items() if values[var.index] > 0.5)
        stages = []
        for j, k in enumerate(self.order):
            mine = [(i, v) for i, at, v in chosen if at == j]
            start, end = mine[0][0], mine[-1][0] + 1
            stages.append(make_stage(self.problem, k, start, end, [v for _, v in mine]))
        return ChainAssignment(tuple(stages))
