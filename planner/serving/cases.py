"""`solve_cases`: the chain problems of a plan, for each way to group devices and to cut the batch.

Without tensor parallelism a pair of micro-batch sizes is a case, and they are solved as one family.
With it there are as many as pairs times groupings; each has a bound that needs no search
(``solvers.chain_fluid``: layers shared as if they were a fluid), those with the lowest are solved
first, and those whose bound is beyond what is still sought are not solved at all. Of hundreds of
alike devices only some groupings are looked into; then the bound that is given is one of them all.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from foreplan.planner.serving.chain import ServingChains
from foreplan.planner.serving.pricing import MicroBatches
from foreplan.solvers.chain_diagnosis import ChainDiagnosis, Obstacle, diagnose
from foreplan.solvers.chain_family import solve_family
from foreplan.solvers.chain_fluid import fluid_latency_s, quick_latency_s
from foreplan.solvers.chain_limits import TimeLimits, solve_within
from foreplan.solvers.chain_problem import ChainProblem, IntArray
from foreplan.solvers.chain_score import ChainAssignment
from foreplan.solvers.solution import Solution

#: Most cases of a plan with tensor parallelism that are solved; the rest counts by its bounds.
MOST_SOLVED = 600
#: Most groupings that are looked into where none has an answer.
MOST_DIAGNOSED = 64


@dataclass
class Answers:
    """What came of the cases.

    Attributes:
        found: answers with their objective and sizes, those near the best among them.
        lower_s: no case has a lower objective.
        proven: whether every case was solved, or shown to be no better.
        evaluations: how much was searched.
    """

    found: list[tuple[float, MicroBatches, ChainAssignment]] = field(default_factory=list)
    lower_s: float = math.inf
    proven: bool = True
    evaluations: int = 0

    @property
    def best_s(self) -> float:
        """Objective of the best answer; ``inf`` without one."""
        return min((objective for objective, _, _ in self.found), default=math.inf)

    def add(self, sizes: MicroBatches, solution: Solution[ChainAssignment]) -> None:
        """Take in the solution of a case."""
        self.evaluations += solution.evaluations
        self.lower_s = min(self.lower_s, solution.lower_bound)
        self.proven = self.proven and solution.status in ("optimal", "infeasible", "cutoff")
        if solution.value is not None:
            self.found.append((solution.objective, sizes, solution.value))


def solve_cases(chains: ServingChains, limits: TimeLimits, *, gap: float, within: float) -> Answers:
    """Solve what may hold the best answer, or one near it.

    Args:
        chains: makes the problems.
        limits: on times.
        gap: relative gap at which a case counts as solved.
        within: relative distance from the best within which the best answer of a pair of
            micro-batch sizes is wanted.
    """
    answers, ways, sizes = Answers(), chains.groupings(), chains.sizes()
    if len(ways) == 1:
        problems = [chains.problem(pair) for pair in sizes]
        solved = solve_family(problems, limits, gap=gap, within=within)
        for pair, solution in zip(sizes, solved, strict=True):
            answers.add(pair, solution)
        return answers
    count = 0
    own: dict[MicroBatches, float] = {}
    for bound, pair, problem in _by_bound(chains, limits, ways, sizes):
        near = answers.best_s * (1 + within)
        if bound >= near or count >= MOST_SOLVED:
            answers.lower_s = min(answers.lower_s, bound)
            answers.proven = answers.proven and bound >= near
            break
        # Of a pair of micro-batch sizes, only what is better than at its other groupings.
        cutoff = min(near, own.get(pair, math.inf))
        if bound >= cutoff:
            answers.lower_s = min(answers.lower_s, bound)
            continue
        count += 1
        solution = solve_within(problem, limits, gap=gap, cutoff=cutoff)
        answers.add(pair, solution)
        own[pair] = min(cutoff, solution.objective)
    if not chains.complete:
        _bound_the_rest(answers, chains, limits)
    return answers


def _bound_the_rest(answers: Answers, chains: ServingChains, limits: TimeLimits) -> None:
    """Lower what is proven to what holds of every grouping, whether it was looked into or not."""
    every, pools = np.ones(len(chains.kinds), dtype=np.int64), chains.pools()
    for pair in chains.sizes():
        bound = fluid_latency_s(chains.problem(pair), limits, counts=every, pools=pools)
        answers.lower_s = min(answers.lower_s, bound)
    answers.proven = answers.proven and answers.lower_s >= answers.best_s


def alone(
    chains: ServingChains, limits: TimeLimits, *, gap: float
) -> list[tuple[float, MicroBatches, ChainAssignment]]:
    """The best answer of each kind of device, or group, that holds the whole model by itself.

    By the law of steady rates a pipeline of a few tokens may be faster than one device and, filled
    and drained, be slower. Of one device the law is exact.

    Args:
        chains: makes the problems.
        limits: on times.
        gap: relative gap at which a case counts as solved.
    """
    sizes = chains.sizes()
    problems = [chains.problem(pair) for pair in sizes]
    found = []
    there = chains.groupings().any(axis=0)
    for counts in np.eye(problems[0].n_types, dtype=np.int64)[there]:
        own = [dataclasses.replace(problem, counts=counts) for problem in problems]
        solved = solve_family(own, limits, gap=gap, within=0.0)
        answers = [
            (solution.objective, pair, solution.value)
            for pair, solution in zip(sizes, solved, strict=True)
            if solution.value is not None
        ]
        if answers:
            found.append(min(answers, key=lambda answer: answer[0]))
    return found


def least_obstacle(chains: ServingChains, sizes: MicroBatches) -> ChainDiagnosis:
    """What stands in the way of the grouping that comes nearest to having an answer.

    Args:
        chains: makes the problems.
        sizes: of the micro-batches.
    """
    found = [
        diagnose(dataclasses.replace(chains.problem(sizes), counts=way))
        for way in chains.groupings()[:MOST_DIAGNOSED]
    ]
    # What fits in memory is nearer than what does not.
    lacking = (Obstacle.MEMORY, Obstacle.AVAILABILITY)
    return min(found, key=lambda each: (each.obstacle in lacking, each.excess))


def _by_bound(
    chains: ServingChains, limits: TimeLimits, ways: IntArray, sizes: list[MicroBatches]
) -> Iterator[tuple[float, MicroBatches, ChainProblem]]:
    """Cases with a bound on their latency, the lowest first.

    Rough bounds are sharpened one by one, no more of them than are needed to know the next lowest.
    """
    rough = np.stack([quick_latency_s(chains.problem(pair), ways, limits) for pair in sizes])
    order = np.argsort(rough, axis=None, kind="stable")
    sharp: list[tuple[float, int]] = []

    def case(place: int) -> tuple[MicroBatches, ChainProblem]:
        pair = sizes[place // len(ways)]
        counts = ways[place % len(ways)]
        return pair, dataclasses.replace(chains.problem(pair), counts=counts)

    for place in map(int, order):
        pair, counts = sizes[place // len(ways)], ways[place % len(ways)]
        floor = float(rough.flat[place])
        if floor == math.inf:
            break
        while sharp and sharp[0][0] <= floor:
            bound, ready = heapq.heappop(sharp)
            yield bound, *case(ready)
        bound = max(floor, fluid_latency_s(chains.problem(pair), limits, counts=counts))
        if bound < math.inf:
            heapq.heappush(sharp, (bound, place))
    while sharp:
        bound, ready = heapq.heappop(sharp)
        yield bound, *case(ready)
