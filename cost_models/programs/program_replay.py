"""Replay of a schedule search: measure the programs a model ranks first, from recorded programs.

For each held-out task with enough recorded programs: order them by predicted latency, "measure" the
first k, keep the best. Nothing is measured anew, so the pool is what was sampled at random; the
best of it stands for the optimum.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.programs.program_table import Floats
from foreplan.errors import SpecError


def search_curve(
    predicted_s: Floats,
    latency_s: Floats,
    task: NDArray[np.str_],
    budgets: Sequence[int],
    *,
    least: int = 4,
) -> dict[str, Floats | int]:
    """Best latency found within a number of measurements, over the best of the pool.

    Args:
        predicted_s: what programs are ranked by (N).
        latency_s: measured (N).
        task: key of each program's task on one device (N).
        budgets: numbers of measurements.
        least: programs a task must have.

    Returns:
        ``tasks``: number of tasks; ``model`` and ``random``: mean over tasks of best found / best
        of the pool, for each budget; random is the exact expectation over orders.

    Raises:
        SpecError: no task has that many programs.
    """
    model, random = [], []
    for name in np.unique(task):
        rows = np.flatnonzero(task == name)
        if len(rows) < least:
            continue
        measured = latency_s[rows]
        order = np.argsort(predicted_s[rows], kind="stable")
        best = np.minimum.accumulate(measured[order]) / measured.min()
        model.append([best[min(k, len(rows)) - 1] for k in budgets])
        random.append([_expected_best(measured, k) / measured.min() for k in budgets])
    if not model:
        raise SpecError("task", got="small tasks", expected=f"a task of {least} programs or more")
    return {
        "tasks": len(model),
        "model": np.mean(model, 0),
        "random": np.mean(random, 0),
    }


def _expected_best(measured: Floats, count: int) -> float:
    """Expected least of ``count`` of the values, drawn without replacement."""
    ordered, n = np.sort(measured), len(measured)
    k = min(count, n)
    # P(least is the i-th) = C(n - 1 - i, k - 1) / C(n, k), by recurrence over i.
    share, total = k / n, 0.0
    for i in range(n - k + 1):
        total += share * ordered[i]
        share *= (n - i - k) / (n - 1 - i) if n - 1 - i > 0 else 0.0
    return float(total)
