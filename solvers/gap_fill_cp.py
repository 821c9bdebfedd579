"""The gap-filling problem with CP-SAT: certifies instances too large for ``gap_fill_milp``.

Optional intervals by slot, unit and pipeline, one NoOverlap a device and resource (with the
backbone's intervals), precedences only where the map puts a job, hints from ``gap_fill.solve``.
Times are whole ticks. Where one is none, it is rounded to the safe side: units and lags up, the
backbone outwards, deadlines down, releases up. The answer is then feasible but CP-SAT's bound is
not one of the original problem and is dropped.

``ortools`` is optional and cannot share a process with ``highspy``. Solvers start no processes, so
the caller says how to run ``gap_fill_cp_model.solve_document`` elsewhere; both its argument and its
result are what JSON can hold.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from foreplan.errors import SpecError
from foreplan.solvers._gap_rows import Direction, Rows, refuse_interference
from foreplan.solvers.gap_fill import solve
from foreplan.solvers.gap_fill_problem import FloatArray, GapFillProblem, Resource
from foreplan.solvers.gap_fill_score import GapFillAnswer, evaluate
from foreplan.solvers.solution import Solution, SolutionStatus

WHOLE = 1e-6
"""Share of a tick within which a time counts as a whole number of them."""


def is_available() -> bool:
    """Whether this interpreter has ``ortools``; it is not imported."""
    return importlib.util.find_spec("ortools") is not None


def solve_cp(
    problem: GapFillProblem,
    run: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    tick_s: float,
    limit: float = 60.0,
    workers: int = 1,
) -> Solution[GapFillAnswer]:
    """Solve with CP-SAT.

    Args:
        problem: the instance, without interference.
        run: calls ``gap_fill_cp_model.solve_document`` on its argument, in a process that has not
            loaded ``highspy``.
        tick_s: seconds of one tick.
        limit: CP-SAT's deterministic time, about seconds of one worker.
        workers: threads; the answer is deterministic with one.

    Returns:
        The better of CP-SAT's answer and the heuristic's; ``evaluations`` is 1.

    Raises:
        SpecError: interference, or a tick that is not above 0.
    """
    refuse_interference(problem)
    if not (math.isfinite(tick_s) and tick_s > 0):
        raise SpecError("tick_s", got=tick_s, expected="above 0")
    known = solve(problem)
    if known.status == SolutionStatus.INFEASIBLE:
        return known
    ticks = _Ticks(tick_s)
    outcome = run(_document(problem, known, ticks) | {"limit": limit, "workers": workers})
    best, objective = known.value, known.objective
    if outcome["map"] is not None:
        found = GapFillAnswer(
            pipeline=np.array(outcome["map"]),
            forward_start_s=np.array(outcome["starts"][0], dtype=float) * tick_s,
            backward_start_s=np.array(outcome["starts"][1], dtype=float) * tick_s,
        )
        total = evaluate(problem, found).total_s
        if total < objective:
            best, objective = found, total
    lower = known.lower_bound
    if ticks.exact and outcome["bound"] is not None:
        lower = max(lower, outcome["bound"] * tick_s)
    if best is not None:
        proven = objective - lower <= max(problem.tolerance_s, WHOLE * tick_s)
        status = SolutionStatus.OPTIMAL if proven else SolutionStatus.FEASIBLE
    else:
        proven = ticks.exact and outcome["status"] == "infeasible"
        status = SolutionStatus.INFEASIBLE if proven else SolutionStatus.LIMIT
    return Solution(
        status=status, value=best, objective=objective, lower_bound=min(lower, objective),
        evaluations=1, solver="CP-SAT",
    )  # fmt: skip


class _Ticks:
    """Rounds seconds to ticks and remembers whether anything was rounded."""

    def __init__(self, tick_s: float) -> None:
        self.tick_s = tick_s
        self.exact = True

    def up(self, seconds: object) -> Any:
        """Nested lists of integers, not less."""
        return self._round(seconds, np.ceil)

    def down(self, seconds: object) -> Any:
        """The same, not more."""
        return self._round(seconds, np.floor)

    def _round(self, seconds: object, towards: Any) -> Any:
        value = np.asarray(seconds, dtype=np.float64) / self.tick_s
        near = np.rint(value)
        whole = np.abs(value - near) <= WHOLE
        self.exact = self.exact and bool(whole.all())
        return np.where(whole, near, towards(value)).astype(np.int64).tolist()


def _document(
    problem: GapFillProblem, known: Solution[GapFillAnswer], ticks: _Ticks
) -> dict[str, Any]:
    rows = Rows.of(problem)
    job = [float(way.job_s.max()) for way in (rows.forward, rows.backward)]
    reach = problem.n_slots * sum(job)
    if known.found:
        reach = known.objective - problem.backbone_s
    document = {
        "slots": problem.n_slots,
        "pipelines": problem.n_pipelines,
        "stages": problem.n_stages,
        "length": ticks.up(problem.backbone_s),
        "deadline": ticks.down(problem.deadline_s),
        "release": ticks.up(problem.release_s),
        "busy": [
            [[_outwards(problem.busy_s[d][r], ticks) for r in Resource] for d in row]
            for row in problem.stage_device
        ],
        "forward": _side(rows.forward, ticks),
        "backward": _side(rows.backward, ticks),
        "cap": problem.live_cap,
        # Rounding can cost each unit a tick.
        "reach": math.ceil(reach / ticks.tick_s) + problem.n_slots * len(rows.forward.row) + 2,
        "hint": None,
        "hint_map": None,
    }
    if known.value is not None:
        starts = (known.value.forward_start_s, known.value.backward_start_s)
        document["hint"] = [np.rint(x / ticks.tick_s).astype(int).tolist() for x in starts]
        document["hint_map"] = known.value.pipeline.tolist()
    return document


def _side(way: Direction, ticks: _Ticks) -> dict[str, Any]:
    return {
        "stage": (way.row // len(Resource)).tolist(),
        "resource": (way.row % len(Resource)).tolist(),
        "duration": ticks.up(way.work),
        "lag": ticks.up(way.lag),
        "edge": ticks.up(way.edge),
    }


def _outwards(spans: FloatArray, ticks: _Ticks) -> list[list[int]]:
    """Whole ticks that cover intervals, disjoint."""
    rows: list[list[int]] = []
    for a, b in zip(ticks.down(spans[:, 0]), ticks.up(spans[:, 1]), strict=True):
        if rows and a <= rows[-1][1]:
            rows[-1][1] = max(rows[-1][1], b)
        elif b > a:
            rows.append([a, b])
    return rows
