"""Brute force over every plan of a small chain problem: the oracle of the other solvers.

Shares no code with them but the final :func:`evaluate`: type sequences and cuts are listed one by
one, all ``V ** L`` variant choices of a cut are scored in one vectorised step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from foreplan.errors import SpecError
from foreplan.solvers.chain_problem import ChainProblem, FloatArray, IntArray
from foreplan.solvers.chain_score import ChainAssignment, evaluate, make_stage
from foreplan.solvers.solution import Solution, SolutionStatus

MAX_PLANS = 20_000_000
"""Plans beyond which an oracle is the wrong tool (about ten seconds)."""


def brute_force(problem: ChainProblem) -> Solution[ChainAssignment]:
    """Score every order of types, every cut and every variant choice.

    Args:
        problem: a small instance.

    Returns:
        Status ``optimal`` or ``infeasible``; ``evaluations`` counts plans.

    Raises:
        SpecError: more than ``MAX_PLANS`` plans.
    """
    n_layers, n_variants = problem.n_layers, problem.n_variants
    sequences = list(type_sequences(problem))
    shapes = sum(math.comb(n_layers - 1, len(s) - 1) for s in sequences)
    plans = shapes * n_variants**n_layers
    if plans > MAX_PLANS:
        raise SpecError("problem", got=f"{plans} plans", expected=f"at most {MAX_PLANS}")
    choices = np.array(list(itertools.product(range(n_variants), repeat=n_layers)), dtype=np.int64)
    omega = problem.omega[np.arange(n_layers), choices].sum(axis=1)
    cost2 = problem.cost2[np.arange(n_layers), choices].sum(axis=1)
    allowed = (omega <= problem.omega_limit) & (cost2 <= problem.cost2_limit)
    best, best_objective = None, math.inf
    for types in sequences:
        for inner in itertools.combinations(range(1, n_layers), len(types) - 1):
            cuts = (0, *inner, n_layers)
            objective = _latency(problem, types, cuts, choices) + problem.theta * omega
            objective = np.where(allowed, objective, math.inf)
            row = int(objective.argmin())
            if objective[row] < best_objective:
                best, best_objective = (types, cuts, choices[row]), float(objective[row])
    if best is None:
        return Solution(
            status=SolutionStatus.INFEASIBLE,
            value=None,
            objective=math.inf,
            lower_bound=math.inf,
            evaluations=plans,
            solver="brute force",
        )
    types, cuts, variants = best
    assignment = ChainAssignment(
        tuple(
            make_stage(problem, k, a, b, tuple(variants[a:b]))
            for k, a, b in zip(types, cuts[:-1], cuts[1:], strict=True)
        )
    )
    score = evaluate(problem, assignment)
    return Solution(
        status=SolutionStatus.OPTIMAL,
        value=assignment,
        objective=score.objective,
        lower_bound=score.objective,
        evaluations=plans,
        solver="brute force",
    )


def type_sequences(problem: ChainProblem) -> Iterator[tuple[int, ...]]:
    """Every distinct sequence of types that the counts and the number of layers allow."""
    frontier: list[tuple[int, ...]] = [()]
    while frontier:
        longer = []
        for prefix in frontier:
            if len(prefix) == problem.n_layers:
                continue
            for k in range(problem.n_types):
                if prefix.count(k) < problem.counts[k]:
                    longer.append((*prefix, k))
        yield from longer
        frontier = longer


def _latency(
    problem: ChainProblem, types: tuple[int, ...], cuts: tuple[int, ...], choices: IntArray
) -> FloatArray:
    """Seconds of every variant choice ``[N, L]`` for one sequence and cut; ``inf`` if too large."""
    prefill, decode = [], []
    fits = np.ones(len(choices), dtype=bool)
    for k, a, b in zip(types, cuts[:-1], cuts[1:], strict=True):
        layers, picked = np.arange(a, b), choices[:, a:b]
        p = problem.prefill_s[k, layers, picked].sum(axis=1)
        d = problem.decode_s[k, layers, picked].sum(axis=1)
        memory = problem.memory_bytes[k, layers, picked].sum(axis=1)
        memory = memory + problem.once_bytes(k, a, b, problem.needs[layers, picked])
        if a == 0:
            p, d = p + problem.first_prefill_s[k], d + problem.first_decode_s[k]
        if b == problem.n_layers:
            p, d = p + problem.last_prefill_s[k], d + problem.last_decode_s[k]
        fits &= (memory <= problem.capacity_limit_bytes[k]) & np.isfinite(p) & np.isfinite(d)
        prefill.append(p)
        decode.append(d)
    for k, k_next in itertools.pairwise(types):
        prefill.append(np.full(len(choices), problem.link_prefill_s[k, k_next]))
        decode.append(np.full(len(choices), problem.link_decode_s[k, k_next]))
    if len(types) > 1:
        back = problem.link_return_decode_s[types[-1], types[0]]
        decode.append(np.full(len(choices), back))
    p_sum, p_max = np.sum(prefill, axis=0), np.max(prefill, axis=0)
    d_sum, d_max = np.sum(decode, axis=0), np.max(decode, axis=0)
    fits &= np.isfinite(p_sum) & np.isfinite(d_sum)
    p_max, d_sum, d_max = (np.where(fits, x, 0.0) for x in (p_max, d_sum, d_max))
    total = (
        np.where(fits, p_sum, math.inf)
        + (problem.prefill_microbatches - 1) * p_max
        + (problem.new_tokens - 1) * np.maximum(d_sum, problem.decode_microbatches * d_max)
    )
    return np.asarray(total, dtype=np.float64)
