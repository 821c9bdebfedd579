"""What a group of devices is worth as one replica: the oracle of `foreplan.solvers.assignment`.

For every batch, pair of micro-batch sizes and way to put the group's devices together to stages
(`foreplan.planner.serving.groups`) the exact solver of a single pipeline finds the best split. Such
a case is only solved if it could beat the best so far by bounds that need no search: layers shared
as if they were a fluid (``solvers.chain_fluid``).
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from foreplan.cost_models.costs import CostBook
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.cluster_entry import Rank
from foreplan.datasets.models.model import Model
from foreplan.planner.serving.chain import ServingChains
from foreplan.planner.serving.groups import groupings
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
        room = tuple(rank.capacity for rank in cluster.ranks())
        self._cases: list[_Case] = []
        for batch in batch_sizes(workload):
            pricing = Pricing(model, replica_workload(workload, batch), costs)
            chains = ServingChains(
                pricing, cluster, room, quality.omega, quality.max_omega, quality.cache_omega
            )
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
        ways = [groups] if self._plain else [self._ways(group) for group in groups]
        most = self._ceilings(np.concatenate(ways)).max(axis=1, initial=0.0)
        if self._plain:
            return np.asarray(most)
        starts = np.cumsum([0, *map(len, ways[:-1])])
        return np.asarray(np.maximum.reduceat(most, starts))

    @property
    def _plain(self) -> bool:
        """Whether every stage has one device, so that kinds are the types of devices."""
        return self.workload.tensor_parallel == 1

    def _ways(self, group: IntArray) -> IntArray:
        """``[W, kinds]`` stages of each kind that the group's devices can be put together to."""
        if self._plain:
            return group[None, :]
        return groupings(self._cases[0].chains.kinds, group.tolist())

    def _ceilings(self, ways: IntArray) -> FloatArray:
        """``[W, cases]`` what each way is worth at most, case by case."""
        columns = [quick_latency_s(case.problem, ways, self.limits) for case in self._cases]
        latency = np.stack(columns, axis=1)
        batch = np.array([case.batch for case in self._cases], dtype=float)
        if not self._rated:
            return np.where(np.isfinite(latency), batch, 0.0)
        ceilings: FloatArray = batch * self.workload.new_tokens / latency
        return ceilings

    def tighter(self, group: IntArray) -> float:
        """A better optimistic worth of one group."""
        return max((ceiling for *_, ceiling in self._by_ceiling(group)), default=0.0)

    def worth(self, group: IntArray, key: int) -> GroupWorth:
        """Solve a group; its best replica is kept under ``key`` for `replica`.

        Of replicas that hold as many requests, where that is asked, the quickest.
        """
        best, bound, quickest_s = 0.0, 0.0, math.inf
        for case, way, ceiling in self._by_ceiling(group):
            if ceiling <= best * (1 + GAP) and (self._rated or ceiling < best):
                bound = max(bound, ceiling)
                break
            tokens = case.batch * self.workload.new_tokens
            found = solve_within(
                dataclasses.replace(case.problem, counts=way), self.limits, gap=GAP,
                cutoff=tokens / (best * (1 + GAP)) if self._rated and best else quickest_s,
                max_evaluations=EVALUATIONS,
            )  # fmt: skip
            if found.lower_bound < math.inf:
                most = tokens / found.lower_bound if self._rated else float(case.batch)
                bound = max(bound, min(most, ceiling))
            if found.value is None:
                continue
            value = tokens / found.objective if self._rated else float(case.batch)
            if value > best or (not self._rated and found.objective < quickest_s):
                best = value
                quickest_s = math.inf if self._rated else found.objective
                self._found[key] = (case, found.value)
        return GroupWorth(best, max(bound, best))

    def _by_ceiling(self, group: IntArray) -> Iterator[tuple[_Case, IntArray, float]]:
        """Cases and ways with what they are worth at most, the highest first."""
        ways = self._ways(group)
        rough = self._ceilings(ways).ravel()
        order = [int(i) for i in np.argsort(-rough, kind="stable") if rough[i] > 0]
        heap: list[tuple[float, int]] = []

        def at(index: int) -> tuple[_Case, IntArray]:
            return self._cases[index % len(self._cases)], ways[index // len(self._cases)]

        for index in order:
            # Those before it in the order have been sharpened, so that what is above it can go.
            while heap and -heap[0][0] >= rough[index]:
                ceiling, ready = heapq.heappop(heap)
                yield *at(ready), -ceiling
            case, way = at(index)
            counted = dataclasses.replace(case.problem, counts=way)
            latency = fluid_latency_s(counted, self.limits)
            sharp = 0.0
            if latency < math.inf:
                tokens = case.batch * self.workload.new_tokens
                sharp = tokens / latency if self._rated and latency else float(rough[index])
            if sharp > 0:
                heapq.heappush(heap, (-min(sharp, float(rough[index])), index))
        while heap:
            ceiling, ready = heapq.heappop(heap)
            yield *at(ready), -ceiling

    @property
    def _rated(self) -> bool:
        return self.workload.objective != "concurrency"

    def replica(self, key: int, deal: Callable[[int, int], Sequence[Rank]]) -> ReplicaDecision:
        """The replica found under ``key``, on the ranks that ``deal(type, how many)`` gives."""
        case, assignment = self._found[key]
        decision = case.chains.decision(case.sizes, assignment)
        stages = []
        for stage, planned in zip(decision.stages, assignment.stages, strict=True):
            kind = case.chains.kinds[planned.device_type]
            rank, *peers = deal(kind.type, kind.degree)
            dealt = {
                "rank": rank.index,
                "device": rank.label,
                "peers": tuple(p.index for p in peers),
            }
            stages.append(stage.model_copy(update=dealt))
        fields = decision.model_dump() | {"stages": tuple(stages)}
        return ReplicaDecision(**fields, batch=case.batch)
