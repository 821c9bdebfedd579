"""`least`: small dense linear programmes, thousands a search, handed to HiGHS itself.

SciPy's ``linprog`` runs the same solver and takes four times as long for programmes of a few rows,
most of it checking its arguments and the answer.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from foreplan.solvers.chain_problem import FloatArray


class Least(NamedTuple):
    """Where a linear programme is least.

    Attributes:
        objective: the value there; ``inf`` if no point meets every row.
        point: ``[N]`` the columns there; empty if there are none.
    """

    objective: float
    point: FloatArray


def least(
    cost: FloatArray,
    rows: FloatArray,
    floor: FloatArray,
    ceiling: FloatArray,
    low: FloatArray,
    high: FloatArray,
    *,
    presolve: bool = True,
) -> Least | None:
    """Minimise ``cost @ x`` over ``floor <= rows @ x <= ceiling`` and ``low <= x <= high``.

    Args:
        cost: ``[N]``.
        rows: ``[M, N]``, entries about 1.
        floor: ``[M]``, ``-inf`` where there is none.
        ceiling: ``[M]``, ``inf`` where there is none.
        low: ``[N]``, as ``floor``.
        high: ``[N]``, as ``ceiling``.
        presolve: whether HiGHS looks for what is redundant first.

    Returns:
        The least value and where; ``None`` where HiGHS proves neither (unbounded, or in numerical
        trouble).
    """
    import highspy  # loaded by those who solve

    count, width = rows.shape
    programme = highspy.HighsLp()
    programme.num_row_, programme.num_col_ = count, width
    programme.col_cost_ = cost
    programme.col_lower_, programme.col_upper_ = low, high
    programme.row_lower_, programme.row_upper_ = floor, ceiling
    matrix = programme.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_ = np.arange(0, count * width + 1, width)
    matrix.index_ = np.tile(np.arange(width), count)
    matrix.value_ = rows.ravel()
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    highs.setOptionValue("output_flag", False)
    if not presolve:
        highs.setOptionValue("presolve", "off")
    highs.passModel(programme)
    highs.run()
    status = highs.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return Least(math.inf, np.empty(0))
    if status != highspy.HighsModelStatus.kOptimal:
        return None
    point = np.array(highs.getSolution().col_value, dtype=np.float64)
    return Least(float(highs.getInfo().objective_function_value), point)
