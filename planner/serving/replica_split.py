"""`ReplicaSplit`: which devices form a replica together, and what is proven about the answer.

``solvers.assignment`` deals devices to groups by what `ReplicaWorth` says each group is worth.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from foreplan.datasets.cluster_entry import Rank
from foreplan.datasets.quantity import format_bound
from foreplan.errors import InfeasibleError, MissingDataError, SpecError
from foreplan.planner.base import Bound, Problem
from foreplan.planner.predict import Forecast
from foreplan.planner.serving.planner import ServingPlanner, serving_model
from foreplan.planner.serving.quality import plan_quality
from foreplan.planner.serving.replica_spec import (
    ReplicaDecision,
    ReplicasDecision,
    ReplicasWorkload,
    replica_workload,
)
from foreplan.planner.serving.replica_worth import ReplicaWorth
from foreplan.planner.serving.time_limits import SLACK, too_short
from foreplan.planner.silent import silent_stdout
from foreplan.solvers.assignment import (
    Assignment,
    AssignmentProblem,
    GroupWorth,
    groupings,
    solve,
)
from foreplan.solvers.solution import Solution

#: Relative gap at which the split counts as optimal, and most groups that are solved for it.
GAP, EVALUATIONS = 1e-3, 400
#: Batches of a run for every device, unless the workload says how many requests there are.
BATCHES = 2

_Problem = Problem[ReplicasWorkload]


class FoundSplit:
    """An assignment with what is proven about it."""

    def __init__(
        self, assignment: Assignment, objective: Literal["worth", "price", "ratio"],
        value: float, bound: float, evaluations: int, unit: str,
    ) -> None:  # fmt: skip
        self.assignment = assignment
        self.value, self.most = value, bound
        self._what, self._evaluations, self._unit = objective, evaluations, unit

    @property
    def gap(self) -> float:
        """Relative to the value; 0 if the bound is reached."""
        return abs(self.most - self.value) / abs(self.value) if self.value else 0.0

    @property
    def proof(self) -> str:
        """What is proven, in words."""
        word = "least" if self._what == "price" else "most"
        verb = "less than" if self._what == "price" else "more than"
        return (
            f"by the solver's law the split gives {self.value:.6g} {self._unit}; no split gives "
            f"{verb} {self.most:.6g} (the {word} of the relaxation)"
        )

    def bound(self, problem: _Problem, decision: ReplicasDecision) -> Bound:
        """As the plan's: in seconds for the tokens of the plan's schedule, where that is asked."""
        tokens = requests_of(problem) * problem.workload.new_tokens
        seconds = tokens / self.most if problem.workload.objective == "throughput" else None
        return Bound(
            status="optimal" if self.gap <= 2 * GAP else "feasible", lower_s=seconds,
            gap=self.gap, solver="assignment over chain_partition", evaluations=self._evaluations,
        )  # fmt: skip


class ReplicaSplit:
    """The assignment problem of one plan."""

    def __init__(self, problem: _Problem) -> None:
        self.problem = problem
        self.workload = problem.workload
        self.worth = ReplicaWorth(
            serving_model(problem), problem.cluster, self.workload, problem.costs,
            plan_quality(serving_model(problem), self.workload, problem.seed),
        )  # fmt: skip
        counts = self.worth.counts
        most = min(self.workload.replica_devices, int(counts.sum()))
        self.groups = groupings(counts.tolist(), most)
        self.optimistic = self.worth.optimistic(self.groups)
        self._asked: dict[int, GroupWorth] = {}
        self._sharp: dict[int, float] = {}
        self.cost = self.worth.prices(self.groups)
        if self.workload.priced and not np.isfinite(self.cost).all():
            unknown = next(t[0] for t in self.worth.types if t[0].price_per_hour is None)
            raise MissingDataError(
                f"the price of {unknown.label} is not known",
                fix="give price_per_hour of every device in the cluster, or another objective",
            )

    def _ask(self, group: int) -> GroupWorth:
        if group not in self._asked:
            self._asked[group] = self.worth.worth(self.groups[group], group)
        return self._asked[group]

    def _tighter(self, group: int) -> float:
        if group not in self._sharp:
            self._sharp[group] = self.worth.tighter(self.groups[group])
        return self._sharp[group]

    def solve(self, allowed: Any = None) -> FoundSplit:
        """Split the devices, with all groups or with some."""
        optimistic = self.optimistic if allowed is None else np.where(allowed, self.optimistic, 0.0)
        unit = "requests" if self.workload.objective == "concurrency" else "tokens/s"
        if self.workload.objective == "tokens_per_price":
            return self._best_ratio(optimistic)
        floor = self.workload.min_throughput_tokens_per_s
        price = self.workload.objective == "price"
        made = AssignmentProblem(
            counts=self.worth.counts, groups=self.groups, optimistic=optimistic,
            cost=np.where(np.isfinite(self.cost), self.cost, 0.0), floor=floor if price else None,
        )  # fmt: skip
        found = self._solved(made)
        if found.value is None:
            raise self._infeasible(made)
        if price:
            return FoundSplit(
                found.value, "price", found.objective, found.lower_bound, found.evaluations,
                "an hour",
            )  # fmt: skip
        if floor is not None and -found.objective < floor * (1 - SLACK):
            raise self._too_few(-found.objective, -found.lower_bound)
        return FoundSplit(
            found.value, "worth", -found.objective, -found.lower_bound, found.evaluations, unit
        )

    def _best_ratio(self, optimistic: Any) -> FoundSplit:
        """Copies of the group that gives most tokens for its price: no mix gives more."""
        ratio = optimistic / self.cost
        best, value, evaluations = -1, 0.0, 0
        ceiling = 0.0
        for group in np.argsort(-ratio, kind="stable"):
            if ratio[group] <= value * (1 + GAP) or evaluations >= EVALUATIONS:
                ceiling = max(ceiling, float(ratio[group]))
                break
            found = self._ask(int(group))
            evaluations += 1
            ceiling = max(ceiling, found.bound / float(self.cost[group]))
            if found.value / self.cost[group] > value:
                best, value = int(group), float(found.value / self.cost[group])
        if best < 0:
            raise self._infeasible(None)
        needed = self.groups[best]
        copies = int((self.worth.counts[needed > 0] // needed[needed > 0]).min())
        return FoundSplit(
            Assignment(((best, copies),)), "ratio", 3600 * value, 3600 * max(ceiling, value),
            evaluations, "tokens a unit of price",
        )  # fmt: skip

    def _too_few(self, value: float, most: float) -> InfeasibleError:
        floor = self.workload.min_throughput_tokens_per_s or 0.0
        return InfeasibleError(
            f"these devices give {value:.4g} tokens/s and no split gives more than {most:.4g}; "
            f"min_throughput_tokens_per_s is {floor:.4g}",
            fix=f"at most {format_bound(value, 4, above=False)}, or more devices",
        )

    def _infeasible(self, made: AssignmentProblem | None) -> InfeasibleError:
        if made is not None and made.floor is not None and made.optimistic.max(initial=0.0) > 0:
            free = AssignmentProblem(
                counts=made.counts, groups=made.groups, optimistic=made.optimistic
            )
            found = self._solved(free)
            if found.value is not None:
                return self._too_few(-found.objective, -found.lower_bound)
        if self._late is not None:
            return self._late
        most = int(self.groups.sum(axis=1).max(initial=0))
        return InfeasibleError(
            f"no group of up to {most} devices holds {serving_model(self.problem).name} with one "
            f"request and meets every limit",
            fix="more replica_devices, fewer bits, a smaller context, or more memory",
        )

    @functools.cached_property
    def _late(self) -> InfeasibleError | None:
        """Whether a time limit is too short for any group; asked for by every split that fails."""
        return too_short(self.workload, self.worth.problems)

    # --------------------------------------------------------------------------- decisions

    def _solved(self, made: AssignmentProblem) -> Solution[Assignment]:
        with silent_stdout():  # scipy's HiGHS prints
            return solve(
                made, self._ask, tighten=self._tighter, gap=GAP, max_evaluations=EVALUATIONS
            )

    def decision(self, assignment: Assignment) -> ReplicasDecision:
        """The assignment dealt to concrete ranks, with rounds that keep replicas busy alike."""
        free = [list(ranks) for ranks in self.worth.types]

        def deal(kind: int, count: int) -> list[Rank]:
            dealt, free[kind] = free[kind][:count], free[kind][count:]
            return dealt

        made = [
            (self.worth.replica(group, deal), group)
            for group, copies in assignment.copies
            for _ in range(copies)
        ]
        first = {group: replica for replica, group in reversed(made)}
        alone = {group: self._seconds(replica) for group, replica in first.items()}
        rounds = deal_requests(
            [alone[group] for _, group in made], [replica.batch for replica, _ in made],
            requests_of(self.problem), each=self.workload.keeps_every_replica,
        )  # fmt: skip
        return ReplicasDecision.of(
            tuple(
                replica.model_copy(update={"rounds": count})
                for (replica, _), count in zip(made, rounds, strict=True)
                if count
            )
        )

    def name(self, group: int) -> str:
        """``2 × t4 + l4``: the devices of a group."""
        kinds = [
            f"{count} × {ranks[0].name}" if count > 1 else str(ranks[0].name)
            for count, ranks in zip(self.groups[group], self.worth.types, strict=True) if count
        ]  # fmt: skip
        return " + ".join(kinds)

    def _seconds(self, replica: ReplicaDecision) -> float:
        return Forecast(
            ServingPlanner(), problem_of_replica(self.problem, replica), replica
        ).total_s


def deal_requests(
    seconds: Sequence[float], batches: Sequence[int], requests: int, *, each: bool = False
) -> tuple[int, ...]:
    """How many batches each replica serves, each next one by whoever is through with it first.

    Args:
        seconds: time of a batch of each replica.
        batches: requests of a batch of each; of any two one divides the other.
        requests: of all together, a multiple of the largest batch.
        each: every replica serves a batch at least, however slow it is.

    Returns:
        Batches of each replica; they hold exactly ``requests``.

    Raises:
        SpecError: too few requests for a batch of each replica, where that is asked.
    """
    first = int(each)
    rounds, left = [first] * len(batches), requests - first * sum(batches)
    if left < 0:
        raise SpecError(
            "workload.requests", got=requests,
            expected=f"at least {sum(batches)}: a batch of each of {len(batches)} replicas",
        )  # fmt: skip
    ready = [((1 + first) * one, k) for k, one in enumerate(seconds)]
    heapq.heapify(ready)
    while left:
        end, k = heapq.heappop(ready)
        if batches[k] > left:  # the rest is for those with smaller batches
            continue
        rounds[k] += 1
        left -= batches[k]
        heapq.heappush(ready, (end + seconds[k], k))
    return tuple(rounds)


def requests_of(problem: _Problem) -> int:
    """Requests of a run of a plan."""
    workload = problem.workload
    return workload.requests or BATCHES * workload.batch * len(problem.cluster.ranks())


def problem_of_replica(problem: _Problem, replica: ReplicaDecision) -> Problem[Any]:
    """The serving problem of one replica."""
    return Problem(
        problem.model, problem.cluster, replica_workload(problem.workload, replica.batch),
        problem.costs, problem.seed,
    )  # fmt: skip
