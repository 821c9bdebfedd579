"""Tests every rule of the gap-filling problem on a given answer, knowing none of the solvers.

Starts are taken from the answer, ends from ``evaluate``; which device, resource or pipeline a unit
has follows from the answer's map, so that "forward and backward on one pipeline" cannot be broken,
only named wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from foreplan.solvers.gap_fill_problem import FloatArray, GapFillProblem, IntArray, Resource
from foreplan.solvers.gap_fill_score import GapFillAnswer, GapFillScore, evaluate


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
    return tuple(_Check(problem, answer, evaluate(problem, answer)).all())


class _Check:
    """The rules over one answer, each as an iterator of what breaks it."""

    def __init__(self, problem: GapFillProblem, answer: GapFillAnswer, score: GapFillScore) -> None:
        self._problem, self._answer, self._score = problem, answer, score
        self._sides = (
            ("forward", problem.forward, answer.forward_start_s, score.forward_end_s),
            ("backward", problem.backward, answer.backward_start_s, score.backward_end_s),
        )

    def all(self) -> Iterator[Violation]:
        """Rule by rule."""
        for rule in (self._gap, self._chain, self._fifo, self._points, self._cap):
            yield from rule()

    def _over(
        self, rule: Rule, excess: FloatArray, words: Callable[[int], str]
    ) -> Iterator[Violation]:
        """A violation for every excess beyond rounding."""
        for x in np.flatnonzero(excess > self._problem.tolerance_s):
            yield Violation(rule, words(int(x)), float(excess[x]))

    def _slots(self, pipeline: int) -> IntArray:
        return np.flatnonzero(self._answer.pipeline == pipeline)

    def _gap(self) -> Iterator[Violation]:
        """No two occupants of one resource at once."""
        problem = self._problem
        for j, s in np.ndindex(problem.stage_device.shape):
            device = int(problem.stage_device[j, s])
            for resource in Resource:
                spans = problem.busy_s[device][resource]
                spans = spans[spans[:, 1] > spans[:, 0]]
                starts, ends = [spans[:, 0]], [spans[:, 1]]
                names = [f"backbone interval {x}" for x in range(len(spans))]
                for name, chain, start, end in self._sides:
                    units = np.flatnonzero((chain.stage == s) & (chain.resource == resource))
                    slots = self._slots(j)
                    starts.append(start[np.ix_(slots, units)].ravel())
                    ends.append(end[np.ix_(slots, units)].ravel())
                    names += [f"{name} of slot {i} unit {u}" for i in slots for u in units]
                yield from self._apart(
                    np.concatenate(starts), np.concatenate(ends), names,
                    f"device {device} {resource.name.lower()}",
                )  # fmt: skip

    def _apart(
        self, start: FloatArray, end: FloatArray, names: list[str], where: str
    ) -> Iterator[Violation]:
        order = np.lexsort((end, start))
        until = np.maximum.accumulate(end[order])

        def words(x: int) -> str:
            before = order[int(np.argmax(end[order][: x + 1]))]
            return f"{names[order[x + 1]]} begins on {where} before {names[before]} ends"

        yield from self._over(Rule.GAP, until[:-1] - start[order][1:], words)

    def _chain(self) -> Iterator[Violation]:
        """Units of a job in order, with the lag of every stage boundary between them."""
        problem = self._problem
        for name, chain, start, end in self._sides:
            table = problem.forward_lag_s if name == "forward" else problem.backward_lag_s
            for u in range(1, len(chain)):
                a, b = sorted((int(chain.stage[u - 1]), int(chain.stage[u])))
                lag = table[self._answer.pipeline, a:b].sum(axis=1)
                yield from self._over(
                    Rule.CHAIN, end[:, u - 1] + lag - start[:, u],
                    lambda i, name=name, u=u: (  # type: ignore[misc]  # bound at once
                        f"{name} of slot {i}: unit {u} begins before unit {u - 1} is there"
                    ),
                )  # fmt: skip

    def _fifo(self) -> Iterator[Violation]:
        """Jobs of a pipeline in order on each resource, one direction at a time."""
        problem = self._problem
        for name, chain, start, end in self._sides:
            for j, s, r in np.ndindex(problem.n_pipelines, problem.n_stages, len(Resource)):
                slots = self._slots(j)
                units = np.flatnonzero((chain.stage == s) & (chain.resource == r))
                if not len(units):
                    continue
                first, last = start[slots, units[0]], end[slots, units[-1]]
                yield from self._over(
                    Rule.FIFO, last[:-1] - first[1:],
                    lambda x, name=name, slots=slots, s=s, j=j: (  # type: ignore[misc]
                        f"{name} of slot {slots[x + 1]} overtakes slot {slots[x]} on stage {s} of "
                        f"pipeline {j}"
                    ),
                )  # fmt: skip

    def _points(self) -> Iterator[Violation]:
        """Deadlines of forwards, releases of backwards."""
        problem, map_ = self._problem, self._answer.pipeline
        if len(problem.forward):
            lag = problem.forward_lag_s[map_, problem.forward.stage[-1] :].sum(axis=1)
            late = self._score.forward_end_s[:, -1] + lag - problem.deadline_s
            yield from self._over(Rule.DEADLINE, late, lambda i: f"forward of slot {i} is late")
        if len(problem.backward):
            lag = problem.backward_lag_s[map_, problem.backward.stage[0] :].sum(axis=1)
            soon = problem.release_s + lag - self._answer.backward_start_s[:, 0]
            yield from self._over(
                Rule.RELEASE, soon, lambda i: f"backward of slot {i} begins too soon"
            )

    def _cap(self) -> Iterator[Violation]:
        """Live jobs of each pipeline whenever a forward ends."""
        problem, score, cap = self._problem, self._score, self._problem.live_cap
        if cap is None:
            return
        for j in range(problem.n_pipelines):
            slots = self._slots(j)
            since, until = score.forward_end_s[slots, -1], score.backward_end_s[slots, -1]
            for x, now in enumerate(since):
                live = int(((since <= now) & (until > now + problem.tolerance_s)).sum())
                if live > cap:
                    yield Violation(
                        Rule.CAP,
                        f"{live} jobs of pipeline {j} are live once slot {slots[x]} has its "
                        "forward",
                        float(live - cap),
                    )
