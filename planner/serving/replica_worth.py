"""What a group of devices is worth as one replica: the oracle of `foreplan.solvers.assignment`.

For every batch and pair of micro-batch sizes the exact solver of a single pipeline finds the best
split over the group. A pair is only solved if it could beat the best so far by bounds that need no
search: layers shared as if they were a fluid (``solvers.chain_fluid``).
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterator

import numpy as np

from foreplan.cost_models.costs import CostBook
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.cluster_entry import Rank
from foreplan.datasets.model import Model
from foreplan.planner.serving.chain import ServingChains, capacities
from foreplan.planner.serving.pricing import MicroBatches, Pricing
from foreplan.planner.serving.quality import PlanQuality
from foreplan.planner.serving.replica_spec import (
    ReplicaDecision,
    ReplicasWorkload,
    batch_sizes,
    replica_workload,
)
from foreplan.planner.serving.time_limits import time_limits
from foreplan.solvers.assignment import GroupWorth
from foreplan.solvers.chain_fluid import fluid_latency_s, quick_latency_s
from foreplan.solvers.chain_limits import solve_within
from foreplan.solvers.chain_problem import ChainProblem, FloatArray, IntArray
from foreplan.solvers.chain_score import ChainAssignment

#: Relative gap of one replica's solver; how much better another batch has to be to be looked for.
GAP = 5e-4
#: Bound evaluations of the solver for one batch and pair of micro-batch sizes of a group.
EVALUATIONS = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class _Case:
    """One batch with its micro-batches, and the problem over all devices of the cluster."""

    chains: ServingChains
    sizes: MicroBatches
    batch: int
    problem: ChainProblem


class ReplicaWorth:
    """Worth of groups: tokens a second, or requests held together.

    Args:
        model: the model.
        cluster: devices and links.
        workload: what is wanted.
        costs: the cost book.
        quality: losses of each layer at each of the workload's bits, and their limit.

    Raises:
        MissingDataError: a price or the memory of a device is not known.
    """

    def __init__(
        self, model: Model, cluster: Cluster, workload: ReplicasWorkload, costs: CostBook,
        quality: PlanQuality,
    ) -> None:  # fmt: skip
        self.workload = workload
        self.limits = time_limits(workload)
        room = capacities(cluster)
        self._cases: list[_Case] = []
        for batch in batch_sizes(workload):
            pricing = Pricing(model, replica_workload(workload, batch), costs)
            chains = ServingChains(pricing, cluster, room, quality.omega, quality.max_omega)
            self._cases += [
                _Case(chains, sizes, batch, chains.problem(sizes)) for sizes in chains.sizes()
            ]
        self.types: list[list[Rank]] = self._cases[0].chains.types
        self._found: dict[int, tuple[_Case, ChainAssignment]] = {}

    @property
    def counts(self) -> IntArray:
        """``[K]`` devices of each kind."""
        return np.array([len(ranks) for ranks in self.types])

    @property
    def problems(self) -> list[ChainProblem]:
        """The chain problem of every batch and pair of micro-batch sizes, over all devices."""
        return [case.problem for case in self._cases]

    def prices(self, groups: IntArray) -> FloatArray:
        """``[G]`` price of each group an hour; NaN where a device has none."""
        each = np.array([ranks[0].price_per_hour or math.nan for ranks in self.types])
        prices: FloatArray = np.where(groups > 0, groups * each, 0.0).sum(axis=1)
        return prices

    def optimistic(self, groups: IntArray) -> FloatArray:
        """``[G]`` no group is worth more; 0 for one that cannot hold the model."""
        ceilings: FloatArray = self._ceilings(groups).max(axis=1, initial=0.0)
        return ceilings

    def _ceilings(self, groups: IntArray) -> FloatArray:
        """``[G, cases]`` the same, case by case."""
        columns = [quick_latency_s(case.problem, groups) for case in self._cases]
        latency = np.stack(columns, axis=1)
        batch = np.array([case.batch for case in self._cases], dtype=float)
        if not self._rated:
            return np.where(np.isfinite(latency), batch, 0.0)
        ceilings: FloatArray = batch * self.workload.new_tokens / latency
        return ceilings

    def tighter(self, group: IntArray) -> float:
        """A better optimistic worth of one group."""
        return max((ceiling for _, ceiling in self._by_ceiling(group)), default=0.0)

    def worth(self, group: IntArray, key: int) -> GroupWorth:
        """Solve a group; its best replica is kept under ``key`` for `replica`."""
        best, bound = 0.0, 0.0
        for case, ceiling in self._by_ceiling(group):
            if ceiling <= best * (1 + GAP):
                bound = max(bound, ceiling)
                break
            tokens = case.batch * self.workload.new_tokens
            found = solve_within(
                dataclasses.replace(case.problem, counts=group), self.limits, gap=GAP,
                cutoff=tokens / (best * (1 + GAP)) if self._rated and best else math.inf,
                max_evaluations=EVALUATIONS,
            )  # fmt: skip
            if found.lower_bound < math.inf:
                most = tokens / found.lower_bound if self._rated else float(case.batch)
                bound = max(bound, min(most, ceiling))
            if found.value is None:
                continue
            value = tokens / found.objective if self._rated else float(case.batch)
            if value > best:
                best = value
                self._found[key] = (case, found.value)
        return GroupWorth(best, max(bound, best))

    def _by_ceiling(self, group: IntArray) -> Iterator[tuple[_Case, float]]:
        """Cases with what they are worth at most, the highest first."""
        rough = self._ceilings(group[None, :])[0]
        order = [int(i) for i in np.argsort(-rough, kind="stable") if rough[i] > 0]
        heap: list[tuple[float, int]] = []
        for index in order:
            # Those before it in the order have been sharpened, so that what is above it can go.
            while heap and -heap[0][0] >= rough[index]:
                ceiling, ready = heapq.heappop(heap)
                yield self._cases[ready], -ceiling
            case = self._cases[index]
            latency = fluid_latency_s(dataclasses.replace(case.problem, counts=group))
            sharp = 0.0
            if latency < math.inf:
                tokens = case.batch * self.workload.new_tokens
                sharp = tokens / latency if self._rated and latency else float(rough[index])
            if sharp > 0:
                heapq.heappush(heap, (-min(sharp, float(rough[index])), index))
        while heap:
            ceiling, ready = heapq.heappop(heap)
            yield self._cases[ready], -ceiling

    @property
    def _rated(self) -> bool:
        return self.workload.objective != "concurrency"

    def replica(self, key: int, deal: Callable[[int], Rank]) -> ReplicaDecision:
        """The replica found under ``key``, on ranks that ``deal`` gives for a kind of device."""
        case, assignment = self._found[key]
        decision = case.chains.decision(case.sizes, assignment)
        stages = []
        for stage, planned in zip(decision.stages, assignment.stages, strict=True):
            rank = deal(planned.device_type)
            stages.append(stage.model_copy(update={"rank": rank.index, "device": rank.label}))
        fields = decision.model_dump() | {"stages": tuple(stages)}
        return ReplicaDecision(**fields, batch=case.batch)
