"""`ReplicasPlanner`: a cluster split into several pipelines that serve side by side.

How it chooses: ``solvers.assignment`` deals devices to groups, one replica each, with the exact
solver of a single pipeline as its oracle (`ReplicaWorth`) and a linear relaxation as its bound.
Every replica of the answer is a serving decision; their schedules, side by side, are the plan's.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from foreplan.cost_models.joint_schedule import joint_schedule
from foreplan.cost_models.memory import MemoryLedger
from foreplan.cost_models.schedule import Schedule
from foreplan.cost_models.timeline import Timeline
from foreplan.datasets.cluster_entry import Rank
from foreplan.errors import InfeasibleError, MissingDataError, SpecError
from foreplan.planner.base import Agreement, Bound, Choice, Kernels, Planner, Problem
from foreplan.planner.predict import Forecast
from foreplan.planner.serving.check import check_decision
from foreplan.planner.serving.pipeline import ServingSchedule
from foreplan.planner.serving.planner import ServingPlanner, serving_model
from foreplan.planner.serving.pricing import Pricing
from foreplan.planner.serving.quality import plan_quality
from foreplan.planner.serving.replica_spec import (
    ReplicaDecision,
    ReplicasDecision,
    ReplicasWorkload,
    replica_workload,
)
from foreplan.planner.serving.replica_worth import ReplicaWorth
from foreplan.planner.serving.time_limits import missed, too_short
from foreplan.solvers.assignment import (
    Assignment,
    AssignmentProblem,
    GroupWorth,
    groupings,
    solve,
)

#: Relative gap at which the split counts as optimal, and most groups that are solved for it.
GAP, EVALUATIONS = 1e-3, 400
#: Actions of all replicas beyond which one replica of each shape stands for its like.
MOST_DRAWN = 120_000
#: Batches of a run for every device, unless the workload says how many requests there are.
BATCHES = 2

_Problem = Problem[ReplicasWorkload]


class ReplicasPlanner(Planner[ReplicasWorkload, ReplicasDecision]):
    """Plans the service of one decoder-only language model by replicas on unlike devices."""

    kind: ClassVar[str] = "replicas"
    workload_type = ReplicasWorkload
    decision_type = ReplicasDecision
    modes: ClassVar[tuple[str, ...]] = ServingPlanner.modes

    # ------------------------------------------------------------------------------- decide

    def decide(self, problem: _Problem) -> Choice[ReplicasDecision]:
        """The best split found and what is proven about it.

        Raises:
            InfeasibleError: no replica fits, or no split meets the limits or the wanted rate.
            MissingDataError: a price or the memory of a device is not known.
        """
        split = _Split(self, problem)
        found = split.solve()
        decision = split.decision(found.assignment)
        late = missed(problem.workload, self._figures(problem, decision))
        if late:
            raise InfeasibleError(
                f"the best replicas by the solver's law have {'; '.join(late)} when simulated",
                fix="relax the limit a little, or give fewer requests a batch",
            )
        return Choice(decision, found.bound(problem, decision), tuple(self._notes(problem, found)))

    def _figures(self, problem: _Problem, decision: ReplicasDecision) -> dict[str, float]:
        return Forecast(self, problem, decision).metrics

    def _notes(self, problem: _Problem, found: _Found) -> Iterator[str]:
        yield from ServingPlanner().assumptions(problem)
        yield found.proof

    def baselines(self, problem: _Problem) -> dict[str, ReplicasDecision | str]:
        """Replicas of like devices, the same with one device each, and one pipeline over all."""
        split = _Split(self, problem)
        sizes = split.groups.sum(axis=1)
        alike = (split.groups > 0).sum(axis=1) == 1
        made: dict[str, ReplicasDecision | str] = {}
        for name, allowed in (
            ("replicas of like devices", alike),
            ("one device a replica", sizes == 1),
            ("one pipeline over all devices", sizes == split.worth.counts.sum()),
        ):
            try:
                decision = split.decision(split.solve(allowed).assignment)
            except InfeasibleError as error:
                made[name] = str(error)
                continue
            twin = next((n for n, d in made.items() if d == decision), None)
            made[name] = decision if twin is None else f"the same decision as {twin}"
        return made

    def objective(self, problem: _Problem, decision: ReplicasDecision, total_s: float) -> float:
        """Seconds, times the price for ``tokens_per_price``; the price; requests held, negated.

        Every decision of a problem serves the same requests, so that seconds compare.
        """
        wanted = problem.workload.objective
        if wanted == "concurrency":
            return -float(sum(r.batch for r in decision.replicas)) + 0.0 * total_s
        if wanted == "price":
            return _price_per_hour(problem, decision) + 0.0 * total_s
        if wanted == "tokens_per_price":
            return total_s * _price_per_hour(problem, decision) / 3600
        return total_s

    # ------------------------------------------------------------------------------- decisions

    def schedule(self, problem: _Problem, decision: ReplicasDecision) -> Schedule:
        """The replicas' schedules side by side; beyond `MOST_DRAWN` actions one of each shape.

        Raises:
            SpecError: a decision for another model, cluster or workload.
        """
        return joint_schedule(
            [
                (self._alone(problem, replica), replica.rounds)
                for replica in self._drawn(problem, decision)
            ]
        )

    def _alone(self, problem: _Problem, replica: ReplicaDecision) -> Schedule:
        """A replica's schedule, which ends where the next one starts: on the first stage."""
        model, workload = serving_model(problem), replica_workload(problem.workload, replica.batch)
        check_decision(model, problem.cluster, workload, replica)
        pricing = Pricing(model, workload, problem.costs)
        return ServingSchedule(pricing, problem.cluster, replica, closing=True).build()

    def _drawn(self, problem: _Problem, decision: ReplicasDecision) -> tuple[ReplicaDecision, ...]:
        """Replicas of the schedule: all, or the first of each shape where all are too many."""
        new = problem.workload.new_tokens
        actions = sum(
            r.rounds
            * 3
            * len(r.stages)
            * (r.batch // r.prefill_microbatch + r.batch // r.decode_microbatch * (new - 1))
            for r in decision.replicas
        )
        if actions <= MOST_DRAWN:
            return decision.replicas
        return tuple({replica.shape: replica for replica in reversed(decision.replicas)}.values())

    def ranks(self, problem: _Problem, decision: ReplicasDecision) -> tuple[int, ...]:
        """Cluster rank of each stage of each replica of the schedule."""
        return tuple(s.rank for r in self._drawn(problem, decision) for s in r.stages)

    def occupied(self, problem: _Problem, decision: ReplicasDecision) -> tuple[int, ...]:
        """Cluster rank of every stage of every replica."""
        return tuple(s.rank for r in decision.replicas for s in r.stages)

    def memory(self, problem: _Problem, decision: ReplicasDecision) -> tuple[MemoryLedger, ...]:
        """Ledgers of the stages, replica by replica."""
        serving = ServingPlanner()
        return tuple(
            ledger
            for replica in self._drawn(problem, decision)
            for ledger in serving.memory(_of_replica(problem, replica), replica)
        )

    def metrics(
        self, problem: _Problem, decision: ReplicasDecision, timeline: Timeline
    ) -> dict[str, float]:
        """Rate of all replicas, the slowest replica's times, requests held, price."""
        workload, schedule = problem.workload, timeline.schedule
        rates: dict[tuple[Any, ...], float] = {}
        first_s, token_s, first_rank = [], [], 0
        prefill = schedule.ops.index("prefill")
        for replica in self._drawn(problem, decision):
            mine = (schedule.rank >= first_rank) & (
                schedule.rank < first_rank + len(replica.stages)
            )
            first_rank += len(replica.stages)
            span = float(timeline.end_s[mine].max() - timeline.start_s[mine].min()) / replica.rounds
            rates[replica.shape] = replica.batch * workload.new_tokens / span
            passes = np.flatnonzero(mine & (schedule.op == prefill))
            passes = passes[: len(passes) // replica.rounds]  # the first round
            first_s.append(float(timeline.end_s[passes].max()))
            if workload.new_tokens > 1:
                token_s.append((span - first_s[-1]) / (workload.new_tokens - 1))
        shapes = [replica.shape for replica in decision.replicas]
        figures = {
            "throughput_tokens_per_s": sum(rates[shape] for shape in shapes),
            "replicas": float(len(shapes)),
            "time_to_first_token_s": max(first_s),
            "average_bits": decision.average_bits,
            "omega": decision.omega,
            "concurrent_requests": float(sum(r.batch for r in decision.replicas)),
        }
        if token_s:
            figures["time_per_output_token_s"] = max(token_s)
        price = _price_per_hour(problem, decision)
        if math.isfinite(price):
            figures["price_per_hour"] = price
            figures["tokens_per_price"] = 3600 * figures["throughput_tokens_per_s"] / price
        return figures

    # ------------------------------------------------------------------------------- real runs

    def kernels(
        self, problem: _Problem, decision: ReplicasDecision, rank: int, *, mode: str
    ) -> Kernels:
        """The decoder stage of ``rank`` within its replica; imports torch."""
        from foreplan.planner.serving.replica_kernels import ReplicaKernels

        number, stage = _place(self._drawn(problem, decision), rank)
        replica = self._drawn(problem, decision)[number]
        return ReplicaKernels(_of_replica(problem, replica), replica, number, stage, mode)

    def reference(
        self, problem: _Problem, decision: ReplicasDecision, *, mode: str
    ) -> dict[str, Any] | None:
        """Tokens of every replica's quantised model, one after the other in one process."""
        serving = ServingPlanner()
        return {
            f"replica {number}": serving.reference(
                _of_replica(problem, replica), replica, mode=mode
            )
            for number, replica in enumerate(self._drawn(problem, decision))
        }

    def agree(self, result: dict[str, Any], reference: dict[str, Any], *, mode: str) -> Agreement:
        """Each replica's tokens as in a serving plan; all of them have to agree."""
        serving = ServingPlanner()
        if set(result) != set(reference):
            return Agreement(False, False, {"failure": "a replica gave no result"})
        each = {name: serving.agree(result[name], reference[name], mode=mode) for name in reference}
        details: dict[str, float | str] = {
            f"{name}: {what}": value
            for name, agreed in each.items()
            for what, value in agreed.details.items()
        }
        return Agreement(
            all(a.passed for a in each.values()), all(a.exact for a in each.values()), details
        )


# ----------------------------------------------------------------------------------------- search


class _Found:
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


class _Split:
    """The assignment problem of one plan."""

    def __init__(self, planner: ReplicasPlanner, problem: _Problem) -> None:
        self.planner, self.problem = planner, problem
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

    def solve(self, allowed: Any = None) -> _Found:
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
        found = solve(made, self._ask, tighten=self._tighter, gap=GAP, max_evaluations=EVALUATIONS)
        if found.value is None:
            raise self._infeasible(made)
        if price:
            return _Found(
                found.value, "price", found.objective, found.lower_bound, found.evaluations,
                "an hour",
            )  # fmt: skip
        if floor is not None and -found.objective < floor:
            raise self._too_few(-found.objective, -found.lower_bound)
        return _Found(
            found.value, "worth", -found.objective, -found.lower_bound, found.evaluations, unit
        )

    def _best_ratio(self, optimistic: Any) -> _Found:
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
        return _Found(
            Assignment(((best, copies),)), "ratio", 3600 * value, 3600 * max(ceiling, value),
            evaluations, "tokens a unit of price",
        )  # fmt: skip

    def _too_few(self, value: float, most: float) -> InfeasibleError:
        floor = self.workload.min_throughput_tokens_per_s or 0.0
        return InfeasibleError(
            f"these devices give {value:.4g} tokens/s and no split gives more than {most:.4g}; "
            f"min_throughput_tokens_per_s is {floor:.4g}",
            fix=f"at most {value:.4g}, or more devices",
        )

    def _infeasible(self, made: AssignmentProblem | None) -> InfeasibleError:
        if made is not None and made.floor is not None and made.optimistic.max(initial=0.0) > 0:
            free = AssignmentProblem(
                counts=made.counts, groups=made.groups, optimistic=made.optimistic
            )
            found = solve(
                free, self._ask, tighten=self._tighter, gap=GAP, max_evaluations=EVALUATIONS
            )
            if found.value is not None:
                return self._too_few(-found.objective, -found.lower_bound)
        late = too_short(self.workload, self.worth.problems)
        if late is not None:
            return late
        most = int(self.groups.sum(axis=1).max(initial=0))
        return InfeasibleError(
            f"no group of up to {most} devices holds {serving_model(self.problem).name} with one "
            f"request and meets every limit",
            fix="more replica_devices, fewer bits, a smaller context, or more memory",
        )

    # --------------------------------------------------------------------------- decisions

    def decision(self, assignment: Assignment) -> ReplicasDecision:
        """The assignment dealt to concrete ranks, with rounds that keep replicas busy alike."""
        free = [list(ranks) for ranks in self.worth.types]

        def deal(kind: int) -> Rank:
            return free[kind].pop(0)

        made = [
            (self.worth.replica(group, deal), group)
            for group, copies in assignment.copies
            for _ in range(copies)
        ]
        first = {group: replica for replica, group in reversed(made)}
        alone = {group: self._seconds(replica) for group, replica in first.items()}
        rounds = deal_requests(
            [alone[group] for _, group in made], [replica.batch for replica, _ in made],
            requests_of(self.problem),
        )  # fmt: skip
        return ReplicasDecision.of(
            tuple(
                replica.model_copy(update={"rounds": count})
                for (replica, _), count in zip(made, rounds, strict=True)
                if count
            )
        )

    def _seconds(self, replica: ReplicaDecision) -> float:
        return Forecast(ServingPlanner(), _of_replica(self.problem, replica), replica).total_s


def deal_requests(
    seconds: Sequence[float], batches: Sequence[int], requests: int
) -> tuple[int, ...]:
    """How many batches each replica serves, each next one by whoever is through with it first.

    Args:
        seconds: time of a batch of each replica.
        batches: requests of a batch of each; of any two one divides the other.
        requests: of all together, a multiple of the largest batch.

    Returns:
        Batches of each replica; they hold exactly ``requests``.
    """
    rounds, left = [0] * len(batches), requests
    ready = [(one, k) for k, one in enumerate(seconds)]
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


def _of_replica(problem: _Problem, replica: ReplicaDecision) -> Problem[Any]:
    """The serving problem of one replica."""
    return Problem(
        problem.model, problem.cluster, replica_workload(problem.workload, replica.batch),
        problem.costs, problem.seed,
    )  # fmt: skip


def _place(replicas: tuple[ReplicaDecision, ...], rank: int) -> tuple[int, int]:
    """(replica, stage) of a rank of the schedule."""
    for number, replica in enumerate(replicas):
        if rank < len(replica.stages):
            return number, rank
        rank -= len(replica.stages)
    raise SpecError("rank", got=rank, expected="a rank of the plan's schedule")


def _price_per_hour(problem: _Problem, decision: ReplicasDecision) -> float:
    """Of all devices in use; NaN where one has no price."""
    ranks: tuple[Rank, ...] = problem.cluster.ranks()
    used = [ranks[s.rank].price_per_hour for r in decision.replicas for s in r.stages]
    return math.nan if None in used else float(sum(price or 0.0 for price in used))
