"""Run a PuLP programme with HiGHS and ask HiGHS itself what it has proven."""

from __future__ import annotations

import math

import highspy
import pulp  # type: ignore[import-untyped]

TOLERANCE = 1e-9
"""Feasibility tolerance handed to HiGHS; rows should be scaled to about 1."""


def run(
    model: pulp.LpProblem, gap: float, max_nodes: int
) -> tuple[list[float] | None, float, bool]:
    """Values by column, bound without the objective's constant, and whether HiGHS finished.

    PuLP 3.3 calls a programme that met its time limit "Optimal" and does not know the status of
    one that met its node limit. An infeasible programme has no values and the bound ``inf``.

    Presolve is off, and with it restarts: HiGHS 1.14 and 1.15 cut off optimal points of programmes
    with both kinds of columns (ERGO-Code/HiGHS#2957; `choice_milp` keeps a case as a test).
    """
    solver = pulp.HiGHS(
        msg=False,
        gapRel=gap,
        gapAbs=0.0,
        threads=1,
        mip_max_nodes=max_nodes,
        random_seed=0,
        presolve="off",
        mip_allow_restart=False,
        mip_feasibility_tolerance=TOLERANCE,
        primal_feasibility_tolerance=TOLERANCE,
    )
    solver.createAndConfigureSolver(model)
    solver.buildSolverModel(model)
    highs = model.solverModel
    highs.run()
    status = highs.getModelStatus()
    kinds = highspy.HighsModelStatus
    if status in (kinds.kInfeasible, kinds.kUnboundedOrInfeasible):
        return None, math.inf, True
    info = highs.getInfo()
    bound = float(info.mip_dual_bound)
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None, bound, False
    return list(highs.getSolution().col_value), bound, status == kinds.kOptimal
