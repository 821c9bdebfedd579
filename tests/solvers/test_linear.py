"""Small linear programmes: the same answers as SciPy's, and what has none."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import linprog  # type: ignore[import-untyped]

from foreplan.solvers._linear import least

INF = np.inf


@pytest.mark.parametrize("presolve", [True, False])
def test_equals_scipy(presolve: bool) -> None:
    statuses = set()
    for seed in range(150):
        rng = np.random.default_rng(seed)
        count, width = int(rng.integers(1, 9)), int(rng.integers(1, 6))
        cost, rows = rng.normal(size=width), rng.normal(size=(count, width))
        rows[rng.random(rows.shape) < 0.3] = 0.0
        ceiling = rng.normal(0.5, 1.0, count)
        low = np.where(rng.random(width) < 0.7, -rng.random(width), -INF)
        high = np.where(rng.random(width) < 0.7, rng.random(width), INF)
        equal = rng.random(count) < 0.2
        theirs = linprog(
            cost, A_ub=rows[~equal], b_ub=ceiling[~equal], A_eq=rows[equal], b_eq=ceiling[equal],
            bounds=np.stack((low, high), 1), options={"presolve": presolve},
        )  # fmt: skip
        ours = least(
            cost, rows, np.where(equal, ceiling, -INF), ceiling, low, high, presolve=presolve
        )
        statuses.add(theirs.status)
        if theirs.status == 0:
            assert ours is not None
            assert ours.objective == pytest.approx(theirs.fun, rel=1e-9, abs=1e-9)
            assert cost @ ours.point == pytest.approx(theirs.fun, rel=1e-9, abs=1e-9)
            assert (rows @ ours.point <= ceiling + 1e-6).all()
            assert (rows @ ours.point >= ceiling - 1e-6)[equal].all()
            assert (low - 1e-6 <= ours.point).all()
            assert (ours.point <= high + 1e-6).all()
        elif theirs.status == 2:
            assert ours is not None
            assert ours.objective == math.inf
            assert not len(ours.point)
        else:
            assert ours is None
    assert statuses >= {0, 2, 3}  # solved, infeasible, unbounded


def test_a_corner_by_hand() -> None:
    # x + y <= 4 and x + 3 y <= 6 with both at least 0: 3 x + 5 y is most at (3, 1).
    found = least(
        np.array([-3.0, -5.0]), np.array([[1.0, 1.0], [1.0, 3.0]]), np.full(2, -INF),
        np.array([4.0, 6.0]), np.zeros(2), np.full(2, INF),
    )  # fmt: skip
    assert found is not None
    assert found.objective == pytest.approx(-14.0)
    assert found.point.tolist() == pytest.approx([3.0, 1.0])
