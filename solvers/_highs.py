"""Run a PuLP programme with HiGHS and ask HiGHS itself what it has proven."""

from __future__ import annotations

import math
from collections.abc import Mapping

import highspy
import pulp  # type: ignore[import-untyped]

TOLERANCE = 1e-9
"""Feasibility tolerance handed to HiGHS; rows should be scaled to about 1."""


def optimise(
    model: pulp.LpProblem,
    *,
    gap: float,
    max_nodes: int,
    absolute_gap: float = 0.0,
    limit_s: float | None = None,
    tolerance: float = TOLERANCE,
    smallest: float = 1e-9,
    starts: Mapping[pulp.LpVariable, float] | None = None,
) -> highspy.Highs:
    """Run HiGHS, which is asked itself afterwards.

    PuLP 3.3 calls a programme that met its time limit "Optimal" and does not know the status of
    one that met its node limit.

    Presolve is off, and with it restarts: HiGHS 1.14 and 1.15 cut off optimal points of programmes
    with both kinds of columns (ERGO-Code/HiGHS#2957; `choice_milp` keeps a case as a test).

    Args:
        model: the programme.
        gap: relative gap at which to stop.
        absolute_gap: absolute one.
        max_nodes: likewise.
        limit_s: likewise, seconds.
        tolerance: of feasibility; rows should be scaled to about 1.
        smallest: coefficients below count as zero.
        starts: a known solution.
    """
    solver = pulp.HiGHS(
        msg=False, gapRel=gap, gapAbs=absolute_gap, threads=1, timeLimit=limit_s,
        mip_max_nodes=max_nodes, random_seed=0, presolve="off", mip_allow_restart=False,
        mip_feasibility_tolerance=tolerance, primal_feasibility_tolerance=tolerance,
        small_matrix_value=smallest,
    )  # fmt: skip
    solver.createAndConfigureSolver(model)
    solver.buildSolverModel(model)
    highs: highspy.Highs = model.solverModel
    if starts:
        # PuLP numbers the columns in an order of its own.
        solution = highspy.HighsSolution()
        solution.col_value = [
            value for _, value in sorted((column.index, value) for column, value in starts.items())
        ]
        highs.setSolution(solution)
    highs.run()
    return highs


def run(
    model: pulp.LpProblem, gap: float, max_nodes: int
) -> tuple[list[float] | None, float, bool]:
    """Values by column, bound without the objective's constant, and whether HiGHS finished.

    An infeasible programme has no values and the bound ``inf``.
    """
    highs = optimise(model, gap=gap, max_nodes=max_nodes)
    status = highs.getModelStatus()
    kinds = highspy.HighsModelStatus
    if status in (kinds.kInfeasible, kinds.kUnboundedOrInfeasible):
        return None, math.inf, True
    info = highs.getInfo()
    bound = float(info.mip_dual_bound)
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None, bound, False
    return list(highs.getSolution().col_value), bound, status == kinds.kOptimal
