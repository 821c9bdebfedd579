"""Tests every rule of the gap-filling problem on a given answer, knowing none of the solvers.

Starts are taken from the answer, ends from ``evaluate``; which device, resource or pipeline a unit
has follows from the answer's map, so that "forward and backward on one pipeline" cannot be broken,
only named wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from foreplan.solvers.gap_fill_problem import (
    FloatArray,
    GapFillAnswer,
    GapFillProblem,
    GapFillScore,
    Resource,
    UnitChain,
    evaluate,
)


class Rule(StrEnum):
    """A rule of ``gap_fill_problem``."""

    MAP = "map"
    GAP = "gap"
    CHAIN = "chain"
    FIFO = "fifo"
    DEADLINE = "deadline"
    RELEASE = "release"
    CAP = "cap"


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule.

    Attributes:
        rule: which.
        message: where, for a person.
        excess_s: by how many seconds; by how many jobs for the cap.
    """

    rule: Rule
    message: str
    excess_s: float


def violations(problem: GapFillProblem, answer: GapFillAnswer) -> tuple[Violation, ...]:
    """Everything that is wrong with an answer, rule by rule; empty for a feasible one.

    Raises:
        SpecError: start times of another shape than the problem's.
    """
    wrong = np.flatnonzero(answer.pipeline >= problem.n_pipelines)
    if len(wrong):
        return tuple(
            Violation(Rule.MAP, f"slot {i} on pipeline {answer.pipeline[i]}", 0.0) for i in wrong
        )
    score = evaluate(problem, answer)
    return (
        *_gap(problem, answer, score),
        *_chain(problem, answer, score),
        *_fifo(problem, answer, score),
        *_points(problem, answer, score),
        *_cap(problem, answer, score),
    )


def _sides(
    problem: GapFillProblem, answer: GapFillAnswer, score: GapFillScore
) -> tuple[tuple[str, UnitChain, FloatArray, FloatArray], ...]:
    return (
        ("forward", problem.forward, answer.forward_start_s, score.forward_end_s),
        ("backward", problem.backward, answer.backward_start_s, score.backward_end_s),
    )


def _gap(
    problem: GapFillProblem, answer: GapFillAnswer, score: GapFillScore
) -> Iterator[Violation]:
    """No two occupants of one resource at once."""
    for j, s in np.ndindex(problem.stage_device.shape):
        device = int(problem.stage_device[j, s])
        for resource in Resource:
            spans = problem.busy_s[device][resource]
            spans = spans[spans[:, 1] > spans[:, 0]]
            starts, ends = [spans[:, 0]], [spans[:, 1]]
            names = [f"backbone interval {x}" for x in range(len(spans))]
            for name, chain, start, end in _sides(problem, answer, score):
                units = np.flatnonzero((chain.stage == s) & (chain.resource == resource))
                slots = np.flatnonzero(answer.pipeline == j)
                starts.append(start[np.ix_(slots, units)].ravel())
                ends.append(end[np.ix_(slots, units)].ravel())
                names += [f"{name} of slot {i} unit {u}" for i in slots for u in units]
            start, end = np.concatenate(starts), np.concatenate(ends)
            order = np.lexsort((end, start))
            until = np.maximum.accumulate(end[order])
            excess = until[:-1] - start[order][1:]
            for x in np.flatnonzero(excess > problem.tolerance_s):
                before = order[int(np.argmax(end[order][: x + 1]))]
                yield Violation(
                    Rule.GAP,
                    f"{names[order[x + 1]]} begins on device {device} {resource.name.lower()} "
                    f"before {names[before]} ends",
                    float(excess[x]),
                )


def _chain(
    problem: GapFillProblem, answer: GapFillAnswer, score: GapFillScore
) -> Iterator[Violation]:
    """Units of a job in order, with the lag of every stage boundary between them."""
    for name, chain, start, end in _sides(problem, answer, score):
        table = problem.forward_lag_s if name == "forward" else problem.backward_lag_s
        for u in range(1, len(chain)):
            a, b = sorted((int(chain.stage[u - 1]), int(chain.stage[u])))
            lag = table[answer.pipeline, a:b].sum(axis=1)
            excess = end[:, u - 1] + lag - start[:, u]
            for i in np.flatnonzero(excess > problem.tolerance_s):
                yield Violation(
                    Rule.CHAIN,
                    f"{name} of slot {i}: unit {u} begins before unit {u - 1} is there",
                    float(excess[i]),
                )


def _fifo(
    problem: GapFillProblem, answer: GapFillAnswer, score: GapFillScore
) -> Iterator[Violation]:
    """Jobs of a pipeline in order on each resource, one direction at a time."""
    for name, chain, start, end in _sides(problem, answer, score):
        for j in range(problem.n_pipelines):
            slots = np.flatnonzero(answer.pipeline == j)
            for s, r in np.ndindex(problem.n_stages, len(Resource)):
                units = np.flatnonzero((chain.stage == s) & (chain.resource == r))
                if not len(units):
                    continue
                first, last = start[slots, units[0]], end[slots, units[-1]]
                excess = last[:-1] - first[1:]
                for x in np.flatnonzero(excess > problem.tolerance_s):
                    yield Violation(
                        Rule.FIFO,
                        f"{name} of slot {slots[x + 1]} overtakes slot {slots[x]} on stage {s} of "
                        f"pipeline {j}",
                        float(excess[x]),
                    )


def _points(
    problem: GapFillProblem, answer: GapFillAnswer, score: GapFillScore
) -> Iterator[Violation]:
    """Deadlines of forwards, releases of backwards."""
    for i, j in enumerate(answer.pipeline):
        if len(problem.forward):
            lag = float(problem.forward_lag_s[j, problem.forward.stage[-1] :].sum())
            excess = float(score.forward_end_s[i, -1]) + lag - float(problem.deadline_s[i])
            if excess > problem.tolerance_s:
                yield Violation(Rule.DEADLINE, f"forward of slot {i} is late", excess)
        if len(problem.backward):
            lag = float(problem.backward_lag_s[j, problem.backward.stage[0] :].sum())
            ready = float(problem.release_s[i]) + lag
            excess = ready - float(answer.backward_start_s[i, 0])
            if excess > problem.tolerance_s:
                yield Violation(Rule.RELEASE, f"backward of slot {i} begins too soon", excess)


def _cap(
    problem: GapFillProblem, answer: GapFillAnswer, score: GapFillScore
) -> Iterator[Violation]:
    """Live jobs of each pipeline whenever a forward ends."""
    cap = problem.live_cap
    if cap is None:
        return
    for j in range(problem.n_pipelines):
        slots = np.flatnonzero(answer.pipeline == j)
        since, until = score.forward_end_s[slots, -1], score.backward_end_s[slots, -1]
        for x, now in enumerate(since):
            live = int(((since <= now) & (until > now + problem.tolerance_s)).sum())
            if live > cap:
                yield Violation(
                    Rule.CAP,
                    f"{live} jobs of pipeline {j} are live once slot {slots[x]} has its forward",
                    float(live - cap),
                )
