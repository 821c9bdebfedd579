"""The serving problem as a `ChainProblem`, and its answers as decisions.

Devices that the cluster describes alike are one *type*, and a type with a number of devices that
share a stage is a *kind*, the solver's device type; the solver orders kinds and leaves devices out,
the answer is dealt to concrete ranks afterwards. One problem a pair of micro-batch sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from foreplan.cost_models.tensor_parallel import shard_model
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.cluster_entry import Rank
from foreplan.datasets.models.attention_window import distinct_kinds, layer_kinds
from foreplan.datasets.models.decoder_memory import layer_bytes, stage_bytes
from foreplan.datasets.models.model import Model
from foreplan.datasets.program import Variant
from foreplan.errors import FailedProgramError
from foreplan.planner.cached_method import cached_method
from foreplan.planner.serving.groups import (
    Kind,
    grouping_count,
    groupings,
    kinds_of,
    types_of,
)
from foreplan.planner.serving.pipeline import TOKEN_BYTES, stage_kernels
from foreplan.planner.serving.pricing import (
    DECODE,
    PREFILL,
    MicroBatches,
    Pricing,
    StageKernels,
)
from foreplan.planner.serving.spec import (
    CACHE_STORAGE,
    STORAGE,
    ServingDecision,
    ServingWorkload,
    StageDecision,
)
from foreplan.planner.serving.workspace import StageWorkspace
from foreplan.solvers.chain_fluid import Pool
from foreplan.solvers.chain_problem import ChainProblem, FloatArray, IntArray
from foreplan.solvers.chain_score import ChainAssignment

#: Most ways to group the devices that are looked into, see `groupings`.
MOST_WAYS = 4096


class ServingChains:
    """Chain problems of one model, workload and cluster.

    Args:
        pricing: prices of the model's passes.
        cluster: devices and links.
        capacity_bytes: what each rank may use.
        omega: ``[L, V]`` quality loss of each layer at each of the workload's bits.
        max_omega: cap on their sum, ``None`` for none.
        cache_omega: what a quantised cache adds to that sum, whatever the layers' bits.
        kinds: what stages may run on; what the workload allows if left out.

    Raises:
        SpecError: a degree of tensor parallelism that nothing here has.
        MissingDataError: a price, or a link between two types that could be neighbours.
    """

    def __init__(
        self, pricing: Pricing, cluster: Cluster, capacity_bytes: tuple[int, ...],
        omega: FloatArray, max_omega: float | None = None, cache_omega: float = 0.0, *,
        kinds: Sequence[Kind] | None = None,
    ) -> None:  # fmt: skip
        self.pricing = pricing
        self.cluster = cluster
        self.omega, self.max_omega, self.cache_omega = omega, max_omega, cache_omega
        self.types = types_of(cluster, capacity_bytes, pricing)
        if kinds is None:
            kinds = kinds_of(pricing.model, pricing.workload, cluster, self.types)
        self.kinds = list(kinds)
        self.capacity = np.array([float(capacity_bytes[t[0].index]) for t in self.types])
        self._capacity_bytes = capacity_bytes
        self._failed: dict[tuple[int, MicroBatches], FailedProgramError] = {}
        self._shards = {1: pricing}
        for degree in {kind.degree for kind in self.kinds} - {1}:
            self._shards[degree] = Pricing(pricing.model, pricing.workload, pricing.costs, degree)

    def restricted(self, kinds: Sequence[Kind]) -> ServingChains:
        """The same with fewer kinds."""
        return ServingChains(
            self.pricing, self.cluster, self._capacity_bytes, self.omega, self.max_omega,
            self.cache_omega, kinds=kinds,
        )  # fmt: skip

    @cached_method
    def groupings(self) -> IntArray:
        """``[G, kinds]`` groups of each kind that exist together: every way, or `MOST_WAYS`."""
        return groupings(self.kinds, self._devices, most=MOST_WAYS)

    @property
    def complete(self) -> bool:
        """Whether these are all ways."""
        return grouping_count(self.kinds, self._devices) <= MOST_WAYS

    def pools(self) -> list[Pool]:
        """The devices of each type, which its kinds are groups of."""
        sizes = np.array([kind.degree for kind in self.kinds])
        types = np.array([kind.type for kind in self.kinds])
        return [
            Pool(np.where(types == t, sizes, 0), count)
            for t, count in enumerate(self._devices)
            if (types == t).any()
        ]

    @property
    def _devices(self) -> list[int]:
        return [len(ranks) for ranks in self.types]

    def usable(self) -> IntArray:
        """Devices of each type that have a place in some grouping."""
        found = np.zeros(len(self.types), dtype=np.int64)
        for t in range(len(self.types)):
            degrees = np.array([kind.degree * (kind.type == t) for kind in self.kinds])
            found[t] = (self.groupings() @ degrees).max(initial=0)
        return found

    def name(self, k: int) -> str:
        """A kind for readers: a device's label, or of several how many and the first."""
        degree, label = self.kinds[k].degree, self.first(k).label
        return label if degree == 1 else f"each of {degree} devices like {label}"

    @property
    def bits(self) -> tuple[int, ...]:
        """Bits of each variant."""
        return self.pricing.workload.bits

    def type_of(self, rank: int) -> int:
        """Type of a cluster rank."""
        return next(k for k, ranks in enumerate(self.types) if any(r.index == rank for r in ranks))

    def kind_of(self, stage: StageDecision) -> int:
        """Kind of what a stage runs on."""
        here = (self.type_of(stage.rank), stage.degree)
        return next(k for k, kind in enumerate(self.kinds) if (kind.type, kind.degree) == here)

    def first(self, k: int) -> Rank:
        """A device of a kind."""
        return self.types[self.kinds[k].type][0]

    @cached_method
    def sizes(self) -> list[MicroBatches]:
        """Every pair of micro-batch sizes to search: divisors of the batch, or the fixed ones.

        Where memory may bind, a second time with kernels that take less of it.
        """
        w = self.pricing.workload
        divisors = [d for d in range(1, w.batch + 1) if w.batch % d == 0]
        prefill = [w.prefill_microbatch] if w.prefill_microbatch else divisors
        decode = [w.decode_microbatch] if w.decode_microbatch else divisors
        fast = [MicroBatches(p, d) for p, d in itertools.product(prefill, decode)]
        return fast + [replace(s, lean=True) for s in fast if self._may_bind(s)]

    def _may_bind(self, sizes: MicroBatches) -> bool:
        """Whether leaner kernels would leave room for more on a kind that cannot hold all."""
        problem = self.problem(sizes)
        held = problem.memory_bytes.max(axis=2).sum(axis=1) + problem.fixed_memory_bytes
        held += problem.first_memory_bytes + problem.last_memory_bytes
        held += problem.workspace_bytes.max(axis=(1, 2, 3))
        tight = np.flatnonzero(held > problem.capacity_bytes)
        return any(
            self.kernels(int(k), replace(sizes, lean=True)) != self.kernels(int(k), sizes)
            for k in tight
            if (int(k), sizes) not in self._failed
        )

    @cached_method
    def kernels(self, k: int, sizes: MicroBatches) -> StageKernels:
        """Variants that devices of kind ``k`` use."""
        price, rank = self._shards[self.kinds[k].degree], self.first(k)
        if not sizes.lean:
            return price.kernels(rank, sizes)
        table = dict(self.kernels(k, replace(sizes, lean=False)).table)
        for bits in self.bits:
            pairs = [
                {f"{PREFILL}/linear/{bits}": one, f"{DECODE}/linear/{bits}": other}
                for _, one, other in price.linears(rank, bits, sizes)
            ]
            if pairs:  # the fastest of those that take least
                room = [self._room_bytes(k, sizes, bits, pair) for pair in pairs]
                table |= pairs[room.index(min(room))]
        return StageKernels(table)

    def _room_bytes(
        self, k: int, sizes: MicroBatches, bits: int, kernels: dict[str, Variant]
    ) -> int:
        """Most that a stage of layers at these bits takes beside what it holds."""
        kind = self.kinds[k]
        shard, w = self._shards[kind.degree].model, self.pricing.workload
        space = _workspace(shard, w, sizes, self.first(k), kernels, kind.degree)
        every = distinct_kinds(shard, w.prompt_tokens + w.new_tokens)
        return max(int(space.room_bytes(of, bits, 0).max()) for of in every)

    def leaner(self, decision: ServingDecision) -> bool:
        """Whether a decision has other kernels than the fastest."""
        sizes = MicroBatches(decision.prefill_microbatch, decision.decode_microbatch)
        return any(
            stage.kernels != self.kernels(self.kind_of(stage), sizes).texts(set(stage.bits))
            for stage in decision.stages
        )

    def unable(self) -> dict[int, FailedProgramError]:
        """Kinds that can run a stage at no micro-batch sizes, and a program that failed there."""
        every = self.sizes()
        for sizes in every:
            self.problem(sizes)
        return {
            k: self._failed[k, every[0]]
            for k in range(len(self.kinds))
            if all((k, sizes) in self._failed for sizes in every)
        }

    @cached_method
    def problem(self, sizes: MicroBatches) -> ChainProblem:
        """The chain problem of one pair of micro-batch sizes.

        Of each kind it counts as many groups as there could be if there were no other kind. No
        layer can be on a kind where a program failed that every stage needs.
        """
        model, w, whole = self.pricing.model, self.pricing.workload, self.pricing
        kinds, bits = range(len(self.kinds)), self.bits
        tokens = w.prompt_tokens + w.new_tokens
        classes = distinct_kinds(model, tokens)
        prefill = np.full((len(kinds), len(classes), len(bits)), np.inf)
        decode = np.full_like(prefill, np.inf)
        held = np.zeros_like(prefill)
        edges, fixed = np.zeros((4, len(kinds))), np.zeros((3, len(kinds)))
        once = np.zeros((len(kinds), len(classes) * len(bits), 4, model.layers))
        for k in kinds:
            rank, price = self.first(k), self._shards[self.kinds[k].degree]
            try:
                kernels = self.kernels(k, sizes)
                for (c, of), (v, b) in itertools.product(enumerate(classes), enumerate(bits)):
                    if f"{PREFILL}/linear/{b}" in kernels.table:
                        pass_ = price.layer(kernels, b, PREFILL, sizes, kind=of)
                        prefill[k, c, v] = price.seconds(rank, pass_)
                        decode[k, c, v] = price.decode_layer_s(rank, kernels, b, sizes, of)
                edges[:, k] = [
                    price.seconds(rank, price.embedding(PREFILL, sizes)),
                    price.seconds(rank, price.embedding(DECODE, sizes)),
                    price.seconds(rank, price.head(kernels, PREFILL, sizes)),
                    price.seconds(rank, price.head(kernels, DECODE, sizes)),
                ]
            except FailedProgramError as failure:
                self._failed[k, sizes] = failure
                prefill[k], decode[k], edges[:, k] = np.inf, np.inf, 0.0
            for phase, table, first, last in ((PREFILL, prefill, 0, 2), (DECODE, decode, 1, 3)):
                table[k] += self._exchange_s(k, phase, sizes, layers=1)
                edges[first, k] += self._exchange_s(k, phase, sizes, first=True)
                edges[last, k] += self._exchange_s(k, phase, sizes, last=True)
            shard = price.model
            items = static_bytes(shard, w, 0, model.layers, (bits[0],) * model.layers)
            cache = items["kv_cache"] / model.layers
            held[k] = [[layer_bytes(shard, STORAGE[b][0], of.mlp) + cache for b in bits]
                       for of in classes]  # fmt: skip
            variants = {} if (k, sizes) in self._failed else self.kernels(k, sizes).table
            space = _workspace(shard, w, sizes, rank, variants, self.kinds[k].degree)
            for need, (of, b) in enumerate(itertools.product(classes, bits)):
                if f"{PREFILL}/linear/{b}" in variants:
                    once[k, need] = space.room_bytes(of, b, round(cache))
            fixed[:, k] = items["embedding"], items["head"], items["buffers"]
        class_of = [classes.index(of) for of in layer_kinds(model, tokens)]

        def every_layer(table: FloatArray) -> FloatArray:
            return table[:, class_of, :]

        return ChainProblem(
            counts=np.array([len(self.types[kind.type]) // kind.degree for kind in self.kinds]),
            prefill_s=every_layer(prefill),
            decode_s=every_layer(decode),
            memory_bytes=every_layer(held),
            capacity_bytes=self.capacity[[kind.type for kind in self.kinds]],
            omega=self.omega,
            first_prefill_s=edges[0],
            first_decode_s=edges[1],
            first_memory_bytes=fixed[0],
            last_prefill_s=edges[2],
            last_decode_s=edges[3],
            last_memory_bytes=fixed[1],
            fixed_memory_bytes=fixed[2],
            workspace_bytes=once,
            needs=np.array(class_of)[:, None] * len(bits) + np.arange(len(bits)),
            link_prefill_s=self._links(whole.hidden_bytes(PREFILL, sizes), "bf16"),
            link_decode_s=self._links(whole.hidden_bytes(DECODE, sizes), "bf16"),
            link_return_decode_s=self._links(sizes.decode * TOKEN_BYTES, "int64"),
            prefill_microbatches=w.batch // sizes.prefill,
            decode_microbatches=w.batch // sizes.decode,
            new_tokens=w.new_tokens,
            theta=w.theta_s,
            max_omega=self.max_omega,
            cost2=np.broadcast_to(-np.array(bits, dtype=float), (model.layers, len(bits))),
            max_cost2=None if w.min_average_bits is None else -w.min_average_bits * model.layers,
        )

    def _links(self, payload_bytes: int, dtype: str) -> FloatArray:
        """Time of a hop between kinds; 0 where there are too few devices to be neighbours.

        Each device of a group gets a message of its own; those between hosts share one link.
        """
        table = np.zeros((len(self.kinds), len(self.kinds)))
        for a, b in itertools.product(range(len(self.kinds)), repeat=2):
            one, other = self.kinds[a], self.kinds[b]
            sources, targets = self.types[one.type], self.types[other.type]
            if one.type != other.type or one.degree + other.degree <= len(sources):
                hop = self.pricing.hop_s(sources[0], targets[-1], payload_bytes, dtype)
                apart = sources[0].host != targets[0].host
                table[a, b] = hop * (other.degree if apart else 1)
        return table

    def _exchange_s(
        self, k: int, phase: str, sizes: MicroBatches, *, layers: int = 0, first: bool = False,
        last: bool = False,
    ) -> float:  # fmt: skip
        """Time of a group's collectives in one pass, over the slowest links of its kind."""
        kind, label = self.kinds[k], self.first(k).label
        times = [0.0]
        for block in kind.blocks:
            works = self.pricing.exchanges(phase, sizes, block, layers, first=first, last=last)
            times.append(sum(self.pricing.costs.cost(w, label).mean_s * n for w, n in works))
        return max(times)

    def decision(
        self, sizes: MicroBatches, assignment: ChainAssignment, *, limits_met: bool = True
    ) -> ServingDecision:
        """An assignment dealt to concrete ranks, the first free one of each type."""
        dealt = self._deal([stage.device_type for stage in assignment.stages])
        stages, omega = [], self.cache_omega
        for stage, (rank, *peers) in zip(assignment.stages, dealt, strict=True):
            bits = tuple(self.bits[v] for v in stage.variants)
            layers = range(stage.start, stage.end)
            omega += float(self.omega[layers, stage.variants].sum())
            stages.append(
                StageDecision(
                    rank=rank.index, device=rank.label, start=stage.start, end=stage.end,
                    bits=bits,
                    kernels=self.kernels(stage.device_type, sizes).texts(set(bits)),
                    peers=tuple(peer.index for peer in peers),
                )
            )  # fmt: skip
        every = [b for stage in stages for b in stage.bits]
        return ServingDecision(
            stages=tuple(stages), prefill_microbatch=sizes.prefill, decode_microbatch=sizes.decode,
            average_bits=sum(every) / len(every), omega=omega, limits_met=limits_met,
            kv_bits=self.pricing.workload.cache_bits,
        )  # fmt: skip

    def _deal(self, kinds: Sequence[int]) -> list[list[Rank]]:
        """Devices for stages of these kinds; neighbours, because large groups choose first."""
        free = [list(ranks) for ranks in self.types]
        dealt: dict[int, list[Rank]] = {}
        for place in sorted(range(len(kinds)), key=lambda i: -self.kinds[kinds[i]].degree):
            kind = self.kinds[kinds[place]]
            dealt[place] = free[kind.type][: kind.degree]
            del free[kind.type][: kind.degree]
        return [dealt[place] for place in range(len(kinds))]


def stage_items(
    model: Model, workload: ServingWorkload, stage: StageDecision, sizes: MicroBatches, rank: Rank
) -> dict[str, int]:
    """What each device of a stage holds, by item; of several the first, which holds most.

    Args:
        model: the whole model.
        workload: batch and lengths.
        stage: the stage.
        sizes: of the micro-batches.
        rank: its first device.
    """
    shard = shard_model(model, stage.degree)
    items = static_bytes(shard, workload, stage.start, stage.end, stage.bits)
    table = stage_kernels(stage).table
    workspace = _workspace(shard, workload, sizes, rank, table, stage.degree)
    items["workspace"] = workspace.stage_bytes(
        stage.start, stage.end, stage.bits, items["kv_cache"]
    )
    return {name: size for name, size in items.items() if size}


def _workspace(
    model: Model, workload: ServingWorkload, sizes: MicroBatches, rank: Rank,
    kernels: Mapping[str, Variant], degree: int,
) -> StageWorkspace:  # fmt: skip
    """Of a stage of so many devices like this one."""
    return StageWorkspace(
        model, workload, sizes, rank.kernel_kind, kernels, degree=degree,
        compute_capability=rank.compute_capability,
    )  # fmt: skip


def static_bytes(
    model: Model, workload: ServingWorkload, start: int, end: int, bits: tuple[int, ...]
) -> dict[str, int]:
    """What a stage holds throughout, by item; see `stage_bytes`."""
    return stage_bytes(
        model, start, end, [STORAGE[b][0] for b in bits], batch=workload.batch,
        positions=workload.prompt_tokens + workload.new_tokens,
        cache_storage=CACHE_STORAGE[workload.cache_bits],
    )  # fmt: skip
