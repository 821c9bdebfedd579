"""Exact solver of the chain problem (see ``chain_problem`` for the law and the symbols)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from foreplan.errors import SpecError
from foreplan.solvers.chain_problem import (
    ChainAssignment,
    ChainProblem,
    ChainScore,
    ChainStage,
    evaluate,
    make_stage,
)
from foreplan.solvers.solution import Solution, SolutionStatus

__all__ = [
    "ChainAssignment",
    "ChainProblem",
    "ChainScore",
    "ChainStage",
    "evaluate",
    "make_stage",
    "solve",
]

_Label = tuple[tuple[float, ...], tuple[int, ...]]


def solve(
    problem: ChainProblem,
    *,
    gap: float = 1e-6,
    cutoff: float = math.inf,
    max_evaluations: int = 100_000,
) -> Solution[ChainAssignment]:
    """Find the best assignment and prove how good it is.

    Args:
        problem: the instance.
        gap: relative gap at which the incumbent counts as optimal, ``>= 0``.
        cutoff: objective (seconds) of the best answer known from elsewhere; assignments that are
            not better by more than ``gap`` are not looked for.
        max_evaluations: bound evaluations after which the search stops; deterministic.

    Returns:
        ``optimal``, ``infeasible``, ``cutoff`` (nothing better than the cutoff exists),
        ``feasible`` or ``limit`` (stopped early, with or without an incumbent).

    Raises:
        SpecError: an argument out of range.
    """
    if not gap >= 0:
        raise SpecError("solve.gap", got=gap, expected=">= 0")
    if max_evaluations < 1:
        raise SpecError("solve.max_evaluations", got=max_evaluations, expected=">= 1")
    n_layers = problem.n_layers
    tables = {
        (k, a): _stage_labels(problem, k, a)
        for k in range(problem.n_types)
        for a in range(n_layers)
    }
    start = tuple([0] * problem.n_types)
    nodes: list[dict[Any, list[Any]]] = [{} for _ in range(n_layers + 1)]
    nodes[0][(start, -1, -1)] = [((0.0,) * 6, None)]
    for a in range(n_layers):
        for (used, last, first), labels in nodes[a].items():
            for k in range(problem.n_types):
                if used[k] >= problem.counts[k]:
                    continue
                now = tuple(u + (j == k) for j, u in enumerate(used))
                hop_p = float(problem.link_prefill_s[last, k]) if last != -1 else 0.0
                hop_d = float(problem.link_decode_s[last, k]) if last != -1 else 0.0
                for b, stage_labels in tables[k, a].items():
                    back = 0.0
                    if b == n_layers and last != -1:
                        back = float(problem.link_return_decode_s[k, first])
                    if not math.isfinite(hop_p + hop_d + back):
                        continue
                    key = (now, k, k if first == -1 else first)
                    into = nodes[b].setdefault(key, [])
                    for cost, parent in labels:
                        for (p, d, _, w, c), variants in stage_labels:
                            new = (
                                cost[0] + p + hop_p,
                                cost[1] + d + hop_d + back,
                                max(cost[2], p, hop_p),
                                max(cost[3], d, hop_d, back),
                                cost[4] + w,
                                cost[5] + c,
                            )
                            if new[4] <= problem.omega_limit and (
                                b < n_layers or new[5] <= problem.cost2_limit
                            ):
                                into.append((new, (parent, k, a, b, variants)))
        for key in list(nodes[a + 1]):
            nodes[a + 1][key] = _pareto(nodes[a + 1][key])
    best: ChainAssignment | None = None
    best_objective = cutoff
    count = 0
    for labels in nodes[n_layers].values():
        for _, parent in labels:
            count += 1
            stages = []
            while parent is not None:
                parent, k, a, b, variants = parent
                stages.append(make_stage(problem, k, a, b, variants))
            assignment = ChainAssignment(tuple(reversed(stages)))
            score = evaluate(problem, assignment)
            if score.feasible and score.objective < best_objective:
                best, best_objective = assignment, score.objective
    if best is None:
        infeasible = math.isinf(cutoff)
        return Solution(
            status=SolutionStatus.INFEASIBLE if infeasible else SolutionStatus.CUTOFF,
            value=None,
            objective=math.inf,
            lower_bound=cutoff,
            evaluations=count,
            solver="chain labels",
        )
    return Solution(
        status=SolutionStatus.OPTIMAL,
        value=best,
        objective=best_objective,
        lower_bound=best_objective,
        evaluations=count,
        solver="chain labels",
    )


def _pareto(labels: list[Any]) -> list[Any]:
    kept: list[Any] = []
    if not labels:
        return kept
    labels = sorted(labels, key=lambda label: label[0])
    costs = np.empty((len(labels), len(labels[0][0])))
    n = 0
    for cost, payload in labels:
        if n and bool((costs[:n] <= np.asarray(cost)).all(axis=1).any()):
            continue
        costs[n] = cost
        n += 1
        kept.append((cost, payload))
    return kept


def _stage_labels(problem: ChainProblem, k: int, start: int) -> dict[int, list[_Label]]:
    """Pareto labels (prefill, decode, memory, omega, cost2) of stages from a layer on."""
    n_layers = problem.n_layers
    base = [0.0, 0.0, float(problem.fixed_memory_bytes[k]), 0.0, 0.0]
    if start == 0:
        base[0] += float(problem.first_prefill_s[k])
        base[1] += float(problem.first_decode_s[k])
        base[2] += float(problem.first_memory_bytes[k])
    last = (
        float(problem.last_prefill_s[k]),
        float(problem.last_decode_s[k]),
        float(problem.last_memory_bytes[k]),
    )
    limit = float(problem.capacity_limit_bytes[k])
    labels: list[_Label] = [(tuple(base), ())]
    table: dict[int, list[_Label]] = {}
    for i in range(start, n_layers):
        longer = []
        for cost, variants in labels:
            for v in range(problem.n_variants):
                if problem.available[k, i, v]:
                    new = (
                        cost[0] + float(problem.prefill_s[k, i, v]),
                        cost[1] + float(problem.decode_s[k, i, v]),
                        cost[2] + float(problem.memory_bytes[k, i, v]),
                        cost[3] + float(problem.omega[i, v]),
                        cost[4] + float(problem.cost2[i, v]),
                    )
                    if new[2] <= limit:
                        longer.append((new, (*variants, v)))
        labels = _pareto(longer)
        if not labels:
            break
        done = labels
        if i + 1 == n_layers:
            done = [
                ((c[0] + last[0], c[1] + last[1], c[2] + last[2], c[3], c[4]), v)
                for c, v in labels
                if c[2] + last[2] <= limit and math.isfinite(c[0] + last[0] + c[1] + last[1])
            ]
        if math.isfinite(base[0] + base[1]):
            table[i + 1] = done
    return table
