from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from foreplan.errors import MissingDataError, SpecError
from foreplan.solvers.gap_fill import GapFillProblem
from foreplan.solvers.gap_fill_check import violations
from foreplan.solvers.gap_fill_cp import is_available, solve_cp
from foreplan.solvers.gap_fill_cp_model import solve_document
from foreplan.solvers.gap_fill_milp import solve_milp
from foreplan.solvers.solution import SolutionStatus

Make = Callable[..., GapFillProblem]
needs_ortools = pytest.mark.skipif(not is_available(), reason="ortools is not installed")


WORKER = """
import json, sys
from foreplan.solvers.gap_fill_cp_model import solve_document
json.dump(solve_document(json.load(sys.stdin)), sys.stdout)
assert "highspy" not in sys.modules
"""


def elsewhere(given: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own, through JSON."""
    done = subprocess.run(
        [sys.executable, "-c", WORKER], input=json.dumps(given), capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.skipif(is_available(), reason="ortools is installed")
def test_without_ortools_it_says_so() -> None:
    with pytest.raises(MissingDataError, match="pip install ortools"):
        solve_document({})


def test_ortools_is_not_needed_to_import() -> None:
    assert "ortools" not in sys.modules


@needs_ortools
@pytest.mark.parametrize("capped", [False, True])
def test_equals_the_programme(capped: bool, make_gaps: Make) -> None:
    """Integer instances in ticks of a second."""
    for seed in range(5):
        problem = make_gaps(seed, capped=capped)
        found, milp = solve_cp(problem, elsewhere, tick_s=1.0), solve_milp(problem)
        assert found.status == milp.status, seed
        if found.value is not None:
            assert found.objective == pytest.approx(milp.objective, abs=1e-5), seed
            assert violations(problem, found.value) == (), seed


@needs_ortools
def test_rounded_answers_are_feasible_and_prove_nothing(make_gaps: Make) -> None:
    """A tick that divides nothing: CP-SAT's bound is of another problem."""
    problem = make_gaps(2, n_pipelines=2, n_slots=3)
    found = solve_cp(problem, elsewhere, tick_s=0.3)
    assert found.value is not None
    assert violations(problem, found.value) == ()
    exact = solve_milp(problem)
    assert found.lower_bound <= exact.objective + 1e-6
    assert found.objective >= exact.objective - 1e-6


@pytest.mark.parametrize("changes", [{"tick_s": 0.0}, {"tick_s": float("nan")}])
def test_a_bad_tick_is_refused(changes: dict[str, Any], make_gaps: Make) -> None:
    with pytest.raises(SpecError, match="tick_s"):
        solve_cp(make_gaps(0), elsewhere, **changes)


def test_interference_is_refused(make_gaps: Make) -> None:
    with pytest.raises(SpecError, match="interference"):
        solve_cp(replace(make_gaps(0), link_slowdown=1.5), elsewhere, tick_s=1.0)


@needs_ortools
def test_a_limit_leaves_the_heuristics_answer(make_gaps: Make) -> None:
    found = solve_cp(make_gaps(248), elsewhere, tick_s=1.0, limit=1e-9)
    assert found.status in (SolutionStatus.FEASIBLE, SolutionStatus.OPTIMAL)
    assert np.isfinite(found.objective)
