"""Treat types that differ in nothing as one type with more devices.

A cluster description often lists every device on its own; the search's states are vectors of
used devices, so four equal devices as four types cost 16 states where one type needs 5.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from foreplan.solvers.chain_problem import ChainProblem, FloatArray
from foreplan.solvers.chain_score import ChainAssignment, make_stage

_BY_TYPE = (
    "prefill_s",
    "decode_s",
    "memory_bytes",
    "capacity_bytes",
    "first_prefill_s",
    "first_decode_s",
    "first_memory_bytes",
    "last_prefill_s",
    "last_decode_s",
    "last_memory_bytes",
    "fixed_memory_bytes",
    "workspace_bytes",
)
_BY_PAIR = ("link_prefill_s", "link_decode_s", "link_return_decode_s")


def merge_types(problem: ChainProblem) -> tuple[ChainProblem, list[list[int]]]:
    """Merge equal types, and drop types without devices.

    Args:
        problem: the instance.

    Returns:
        The smaller instance, and for each of its types the types it stands for. A problem without
        any device is returned as it is.
    """
    groups: list[list[int]] = []
    for k in range(problem.n_types):
        if problem.counts[k] == 0:
            continue
        for group in groups:
            if all(_equal(problem, k, other) for other in group):
                group.append(k)
                break
        else:
            groups.append([k])
    if not groups or len(groups) == problem.n_types:
        return problem, [[k] for k in range(problem.n_types)]
    heads = [group[0] for group in groups]
    changes: dict[str, Any] = {name: getattr(problem, name)[heads] for name in _BY_TYPE}
    for name in _BY_PAIR:
        link: FloatArray = getattr(problem, name)
        merged = link[np.ix_(heads, heads)]
        for at, group in enumerate(groups):
            if len(group) > 1:
                merged[at, at] = link[group[0], group[1]]
        changes[name] = merged
    counts = np.array([int(problem.counts[group].sum()) for group in groups])
    return replace(problem, counts=counts, **changes), groups


def split_types(
    problem: ChainProblem, groups: list[list[int]], assignment: ChainAssignment
) -> ChainAssignment:
    """Give the stages of a merged problem's assignment devices of the original types.

    Args:
        problem: the original instance.
        groups: from :func:`merge_types`.
        assignment: of the merged instance.
    """
    left = problem.counts.copy()
    stages = []
    for stage in assignment.stages:
        k = next(k for k in groups[stage.device_type] if left[k] > 0)
        left[k] -= 1
        stages.append(make_stage(problem, k, stage.start, stage.end, stage.variants))
    return ChainAssignment(tuple(stages))


def _equal(problem: ChainProblem, j: int, k: int) -> bool:
    """Whether exchanging devices of two types changes nothing."""
    if not all(np.array_equal(x[j], x[k]) for x in (getattr(problem, n) for n in _BY_TYPE)):
        return False
    others = [x for x in range(problem.n_types) if x not in (j, k)]
    for link in (getattr(problem, name) for name in _BY_PAIR):
        if not np.array_equal(link[j, others], link[k, others]):
            return False
        if not np.array_equal(link[others, j], link[others, k]):
            return False
        # A type with one device has no hop to itself.
        within = [link[j, k], link[k, j]]
        within += [link[t, t] for t in (j, k) if problem.counts[t] > 1]
        if len(set(within)) > 1:
            return False
    return True
