"""`choose_cache`: how many bits the KV cache gets where the workload leaves it open (`auto`).

One number for all layers, so that the choice is made outside of the solver: a decision for each,
and the better one. Where nobody measured what 8 bits lose, they are taken only if 16 do not fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from foreplan.errors import InfeasibleError
from foreplan.planner.base import Choice, Problem
from foreplan.planner.serving.spec import ServingDecision, ServingWorkload

Serving = Problem[ServingWorkload]

#: What a plan says that was not free to weigh both.
_UNMEASURED = (
    "kv_bits=auto: the KV cache keeps 16 bits, with which the model fits; what 8 lose was not "
    "measured"
)


def with_cache(problem: Serving, bits: Literal[16, 8]) -> Serving:
    """The problem with this number of bits, where its workload leaves it open."""
    if problem.workload.kv_bits != "auto":
        return problem
    workload = problem.workload.model_copy(update={"kv_bits": bits})
    return dataclasses.replace(problem, workload=workload)


def choose_cache(
    problem: Serving,
    decide: Callable[[Serving], Choice[ServingDecision]],
    objective: Callable[[Serving, ServingDecision], float],
    *,
    measured: bool,
) -> Choice[ServingDecision]:
    """The better of the decisions with 16 and with 8 bits.

    Args:
        problem: whose workload says ``auto``.
        decide: the best decision of a problem that says how many.
        objective: what is compared.
        measured: whether what 8 bits lose is known, and so part of the objective and of limits.

    Returns:
        The better one; what is proven for both, of which it is a decision.

    Raises:
        InfeasibleError: no decision with 8 bits either.
    """
    plain, eight = with_cache(problem, 16), with_cache(problem, 8)
    try:
        first = decide(plain)
    except InfeasibleError:
        return decide(eight)
    if not measured:
        return dataclasses.replace(first, assumptions=(*first.assumptions, _UNMEASURED))
    try:
        second = decide(eight)
    except InfeasibleError:  # layers that share a limit with the cache
        return first
    worth = objective(plain, first.decision), objective(eight, second.decision)
    best, other = (first, second) if worth[0] <= worth[1] else (second, first)
    mine, theirs = best.bound, other.bound
    lower_s, gap = mine.lower_s, mine.gap
    if lower_s and gap is not None and theirs.lower_s is not None and theirs.lower_s < lower_s:
        # Of the law's objective that the gap was stated for.
        gap = 1 - theirs.lower_s / (lower_s / (1 - gap))
        lower_s = theirs.lower_s
    proven = mine.status == theirs.status == "optimal"
    bound = dataclasses.replace(
        mine, status="optimal" if proven else "feasible", lower_s=lower_s, gap=gap,
        evaluations=mine.evaluations + theirs.evaluations,
    )  # fmt: skip
    near = {**best.near, f"KV cache of {other.decision.kv_bits} bits": other.decision}
    return dataclasses.replace(best, bound=bound, near=near)
