"""`ReplicasPlanner`: a cluster split into several pipelines that serve side by side.

How it chooses: ``solvers.assignment`` deals devices to groups, one replica each, with the exact
solver of a single pipeline as its oracle (`ReplicaWorth`) and a linear relaxation as its bound.
Every replica of the answer is a serving decision; their schedules, side by side, are the plan's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from foreplan.cost_models.joint_schedule import joint_schedule
from foreplan.cost_models.memory import MemoryLedger
from foreplan.cost_models.schedule import Schedule
from foreplan.cost_models.timeline import Timeline
from foreplan.datasets.cluster_entry import Rank
from foreplan.errors import InfeasibleError, SpecError
from foreplan.planner.base import Agreement, Choice, Kernels, Live, Planner, Problem
from foreplan.planner.predict import Forecast
from foreplan.planner.serving.check import check_decision
from foreplan.planner.serving.kernel_notes import expert_notes, kernel_notes
from foreplan.planner.serving.pipeline import ServingSchedule
from foreplan.planner.serving.planner import ServingPlanner, serving_model
from foreplan.planner.serving.pricing import Pricing
from foreplan.planner.serving.replica_spec import (
    ReplicaDecision,
    ReplicasDecision,
    ReplicasWorkload,
    replica_workload,
)
from foreplan.planner.serving.replica_split import (
    FoundSplit,
    ReplicaSplit,
    problem_of_replica,
    requests_of,
)
from foreplan.planner.serving.time_limits import SLACK, missed, time_limits

#: Actions of all replicas beyond which one replica of each shape stands for its like.
MOST_DRAWN = 120_000
#: Actions that bring results to another stage.
MOVES = ("send", "recv")
#: Kinds of replicas that are each left out once to see how sure the choice is, and most devices
#: for which that costs less than the plan.
NEAR, FEW = 3, 64

_Problem = Problem[ReplicasWorkload]


class ReplicasPlanner(Planner[ReplicasWorkload, ReplicasDecision]):
    """Plans the service of one decoder-only language model by replicas on unlike devices."""

    kind: ClassVar[str] = "replicas"
    whole_layers: ClassVar[bool] = True
    workload_type = ReplicasWorkload
    decision_type = ReplicasDecision
    modes: ClassVar[tuple[str, ...]] = ServingPlanner.modes

    def __init__(self) -> None:
        self._known: tuple[_Problem, ReplicaSplit] | None = None

    def _split(self, problem: _Problem) -> ReplicaSplit:
        """Made once a problem: decide and baselines share it, with what groups are worth."""
        if self._known is None or self._known[0] is not problem:
            self._known = problem, ReplicaSplit(problem)
        return self._known[1]

    # ------------------------------------------------------------------------------- decide

    def decide(self, problem: _Problem) -> Choice[ReplicasDecision]:
        """The best split found and what is proven about it.

        Raises:
            InfeasibleError: no replica fits, or no split meets the limits or the wanted rate.
            MissingDataError: a price or the memory of a device is not known.
            SpecError: fewer requests than a batch of each replica.
        """
        split = self._split(problem)
        found = split.solve()
        decision = split.decision(found.assignment)
        if late := self._missed(problem, decision):
            raise InfeasibleError(
                f"the best replicas by the solver's law have {'; '.join(late)} when simulated",
                fix="relax the limit or the wanted rate a little",
            )
        few = len(problem.cluster.ranks()) <= FEW
        near = dict(self._near(problem, split, found)) if few else {}
        notes = tuple(self._notes(problem, found, decision))
        return Choice(decision, found.bound(problem, decision), notes, near)

    def _near(
        self, problem: _Problem, split: ReplicaSplit, found: FoundSplit
    ) -> Iterator[tuple[str, ReplicasDecision]]:
        """The best split without each kind of replica of the answer, the most used first."""
        used = sorted(found.assignment.copies, key=lambda item: -item[1])
        for group, _ in used[:NEAR]:
            try:
                other = split.solve(np.arange(len(split.groups)) != group)
                decision = split.decision(other.assignment)
            except (InfeasibleError, SpecError):  # the other split may want more requests
                continue
            if not missed(problem.workload, self._figures(problem, decision)):
                yield f"without replicas of {split.name(group)}", decision

    def _figures(self, problem: _Problem, decision: ReplicasDecision) -> dict[str, float]:
        return Forecast.of(self, problem, decision).metrics

    def _missed(self, problem: _Problem, decision: ReplicasDecision) -> tuple[str, ...]:
        """Limits, the wanted rate among them, that a decision misses when simulated, in words."""
        figures = self._figures(problem, decision)
        late = missed(problem.workload, figures)
        floor = problem.workload.min_throughput_tokens_per_s or 0.0
        rate = figures["throughput_tokens_per_s"]
        if rate >= floor * (1 - SLACK):
            return late
        return (*late, f"{rate:.4g} tokens/s below {floor:.4g}")

    def _notes(
        self, problem: _Problem, found: FoundSplit, decision: ReplicasDecision
    ) -> Iterator[str]:
        yield from ServingPlanner().assumptions(problem)
        stages = [stage for replica in decision.replicas for stage in replica.stages]
        yield from kernel_notes(stages, problem.cluster.ranks())
        yield from expert_notes(serving_model(problem), stages, problem.cluster.ranks())
        yield found.proof
        yield (
            "throughput is of replicas that are always at work; the total is of a run of "
            f"{requests_of(problem)} requests, which some replicas end before others"
        )
        idle = sum(copies for _, copies in found.assignment.copies) - len(decision.replicas)
        if idle:
            yield (
                f"{idle} of the split's replicas left out: a run of {requests_of(problem)} "
                "requests is over before they would take a batch; more requests would use them"
            )

    def baselines(self, problem: _Problem) -> dict[str, ReplicasDecision | str]:
        """Replicas of like devices, the same with one device each, and one pipeline over all."""
        split = self._split(problem)
        sizes = split.groups.sum(axis=1)
        alike = (split.groups > 0).sum(axis=1) == 1
        made: dict[str, ReplicasDecision | str] = {}
        for name, allowed in (
            ("replicas of like devices", alike),
            ("one device a replica", sizes == 1),
            ("one pipeline over all devices", sizes == split.worth.counts.sum()),
        ):
            if not allowed.any():
                made[name] = (
                    f"a replica has at most {problem.workload.replica_devices} of the "
                    f"{split.worth.counts.sum()} devices (replica_devices)"
                )
                continue
            try:
                decision = split.decision(split.solve(allowed).assignment)
            except (InfeasibleError, SpecError) as error:
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

    def judged(self, problem: _Problem, decision: ReplicasDecision) -> ReplicasDecision:
        """Late, or below the wanted rate, where it is so when simulated."""
        w = problem.workload
        free = time_limits(w).none and w.min_throughput_tokens_per_s is None
        if free or not decision.limits_met:
            return decision
        return decision.model_copy(update={"limits_met": not self._missed(problem, decision)})

    # ------------------------------------------------------------------------------- decisions

    def schedule(self, problem: _Problem, decision: ReplicasDecision) -> Schedule:
        """The replicas' schedules side by side; beyond `MOST_DRAWN` actions one of each shape.

        Raises:
            SpecError: a decision for another model, cluster or workload.
        """
        return joint_schedule(
            [
                (self._alone(problem, replica).build(), replica.rounds)
                for replica in self._drawn(problem, decision)
            ]
        )

    def _alone(self, problem: _Problem, replica: ReplicaDecision) -> ServingSchedule:
        """A replica's schedule, which ends where the next one starts: on the first stage."""
        model, workload = serving_model(problem), replica_workload(problem.workload, replica.batch)
        check_decision(model, problem.cluster, workload, replica)
        pricing = Pricing(model, workload, problem.costs)
        return ServingSchedule(pricing, problem.cluster, replica, closing=True)

    def real(
        self, problem: _Problem, decision: ReplicasDecision
    ) -> tuple[Schedule, tuple[int, ...]]:
        """As simulated; of a stage of several devices with every sum as an action of its own."""
        drawn = self._drawn(problem, decision)
        parts = [(self._alone(problem, replica).pieces(), replica.rounds) for replica in drawn]
        return joint_schedule(parts), self.ranks(problem, decision)

    def processes(self, problem: _Problem, decision: ReplicasDecision) -> int:
        """One a device; the schedule of a real run is not made for that."""
        return len(self.ranks(problem, decision))

    def _drawn(self, problem: _Problem, decision: ReplicasDecision) -> tuple[ReplicaDecision, ...]:
        """Replicas of the schedule: all, or the first of each shape where all are too many."""
        new = problem.workload.new_tokens
        actions = sum(
            r.rounds
            * 3
            * len(r.ranks)
            * (r.batch // r.prefill_microbatch + r.batch // r.decode_microbatch * (new - 1))
            for r in decision.replicas
        )
        if actions <= MOST_DRAWN:
            return decision.replicas
        return tuple({replica.shape: replica for replica in reversed(decision.replicas)}.values())

    def ranks(self, problem: _Problem, decision: ReplicasDecision) -> tuple[int, ...]:
        """Cluster rank of each device of each replica of the schedule."""
        return tuple(rank for r in self._drawn(problem, decision) for rank in r.ranks)

    def occupied(self, problem: _Problem, decision: ReplicasDecision) -> tuple[int, ...]:
        """Cluster rank of every device of every replica."""
        return tuple(rank for r in decision.replicas for rank in r.ranks)

    def memory(self, problem: _Problem, decision: ReplicasDecision) -> tuple[MemoryLedger, ...]:
        """Ledgers of the stages, replica by replica."""
        serving = ServingPlanner()
        return tuple(
            ledger
            for replica in self._drawn(problem, decision)
            for ledger in serving.memory(problem_of_replica(problem, replica), replica)
        )

    def metrics(
        self, problem: _Problem, decision: ReplicasDecision, timeline: Timeline
    ) -> dict[str, float]:
        """Rate of all replicas at work and that of the run, the slowest's times, the price.

        A run ends with replicas that have nothing left to do: its tokens over its total are fewer
        than replicas that are always at work give (``throughput_tokens_per_s``).
        """
        workload, schedule = problem.workload, timeline.schedule
        rates: dict[tuple[Any, ...], float] = {}
        first_s, token_s, first_rank = [], [], 0
        moved = np.isin(schedule.op, [schedule.ops.index(op) for op in MOVES if op in schedule.ops])
        for replica in self._drawn(problem, decision):
            mine = (schedule.rank >= first_rank) & (schedule.rank < first_rank + len(replica.ranks))
            first_rank += len(replica.ranks)
            span = float(timeline.end_s[mine].max() - timeline.start_s[mine].min()) / replica.rounds
            rates[replica.shape] = replica.batch * workload.new_tokens / span
            passes = np.flatnonzero(mine & (schedule.step == 0) & ~moved)
            passes = passes[: len(passes) // replica.rounds]  # the first round
            first_s.append(float(timeline.end_s[passes].max()))
            if workload.new_tokens > 1:
                token_s.append((span - first_s[-1]) / (workload.new_tokens - 1))
        shapes = [replica.shape for replica in decision.replicas]
        requests = sum(replica.batch * replica.rounds for replica in decision.replicas)
        figures = {
            "throughput_tokens_per_s": sum(rates[shape] for shape in shapes),
            "requests": float(requests),
            "run_tokens_per_s": requests * workload.new_tokens / timeline.makespan_s,
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
        """The decoder stage of ``rank`` within its replica, or its part of one; imports torch."""
        from foreplan.planner.serving.replica_kernels import ReplicaKernels

        number, own = _place(self._drawn(problem, decision), rank)
        replica = self._drawn(problem, decision)[number]
        return ReplicaKernels(problem_of_replica(problem, replica), replica, number, own, mode)

    def live(self, problem: _Problem, decision: ReplicasDecision, rank: int, *, mode: str) -> Live:
        """A stage of a replica that requests go through as they come; imports torch."""
        from foreplan.planner.serving.live_stage import LiveStage

        return LiveStage.of(problem, [(r, r.batch) for r in decision.replicas], rank, mode)

    def alone(
        self, problem: _Problem, decision: ReplicasDecision, given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Tokens of each request by itself."""
        from foreplan.planner.serving.live_stage import tokens_alone

        return tokens_alone(problem, [(r, r.batch) for r in decision.replicas], given)

    def reference(
        self, problem: _Problem, decision: ReplicasDecision, *, mode: str
    ) -> dict[str, Any] | None:
        """Tokens of every replica's quantised model, one after the other in one process."""
        serving = ServingPlanner()
        return {
            f"replica {number}": serving.reference(
                problem_of_replica(problem, replica), replica, mode=mode
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


def _place(replicas: tuple[ReplicaDecision, ...], rank: int) -> tuple[int, int]:
    """(replica, rank in it) of a rank of the schedule."""
    for number, replica in enumerate(replicas):
        if rank < len(replica.ranks):
            return number, rank
        rank -= len(replica.ranks)
    raise SpecError("rank", got=rank, expected="a rank of the plan's schedule")


def _price_per_hour(problem: _Problem, decision: ReplicasDecision) -> float:
    """Of all devices in use; NaN where one has no price."""
    ranks: tuple[Rank, ...] = problem.cluster.ranks()
    used = [ranks[rank].price_per_hour for r in decision.replicas for rank in r.ranks]
    return math.nan if None in used else float(sum(price or 0.0 for price in used))
