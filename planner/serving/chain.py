"""The serving problem as a `ChainProblem`, and its answers as decisions.

Devices that the cluster describes alike are one *type*; the solver orders types and leaves devices
out, the answer is dealt to concrete ranks afterwards. One problem a pair of micro-batch sizes.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np

from foreplan.datasets.cluster import Cluster
from foreplan.datasets.cluster_entry import Rank
from foreplan.datasets.decoder_memory import stage_bytes
from foreplan.datasets.model import Model
from foreplan.errors import MissingDataError
from foreplan.planner.serving.pipeline import TOKEN_BYTES
from foreplan.planner.serving.pricing import (
    DECODE,
    PREFILL,
    MicroBatches,
    Pricing,
    StageKernels,
    device_kind,
)
from foreplan.planner.serving.spec import (
    STORAGE,
    ServingDecision,
    ServingWorkload,
    StageDecision,
)
from foreplan.solvers.chain_problem import ChainProblem, FloatArray
from foreplan.solvers.chain_score import ChainAssignment

#: What cuBLAS keeps for a stream of a Hopper GPU (torch, CUBLAS_WORKSPACE_CONFIG).
_CUBLAS_BYTES = 32 << 20


class ServingChains:
    """Chain problems of one model, workload and cluster.

    Args:
        pricing: prices of the model's passes.
        cluster: devices and links.
        capacity_bytes: what each rank may use.
        omega: ``[L, V]`` quality loss of each layer at each of the workload's bits.
        max_omega: cap on their sum, ``None`` for none.

    Raises:
        MissingDataError: a price, or a link between two types that could be neighbours.
    """

    def __init__(
        self, pricing: Pricing, cluster: Cluster, capacity_bytes: tuple[int, ...],
        omega: FloatArray, max_omega: float | None = None,
    ) -> None:  # fmt: skip
        self.pricing = pricing
        self.cluster = cluster
        self.omega, self.max_omega = omega, max_omega
        groups: dict[tuple[object, ...], list[Rank]] = {}
        for rank, capacity in zip(cluster.ranks(), capacity_bytes, strict=True):
            key = (rank.host, rank.name, rank.profile, capacity)
            groups.setdefault(key, []).append(rank)
        self.types: list[list[Rank]] = list(groups.values())
        self.capacity = np.array([float(capacity_bytes[t[0].index]) for t in self.types])

    @property
    def bits(self) -> tuple[int, ...]:
        """Bits of each variant."""
        return self.pricing.workload.bits

    def type_of(self, rank: int) -> int:
        """Type of a cluster rank."""
        return next(k for k, ranks in enumerate(self.types) if any(r.index == rank for r in ranks))

    def sizes(self) -> list[MicroBatches]:
        """Every pair of micro-batch sizes to search: divisors of the batch, or the fixed ones."""
        w = self.pricing.workload
        divisors = [d for d in range(1, w.batch + 1) if w.batch % d == 0]
        prefill = [w.prefill_microbatch] if w.prefill_microbatch else divisors
        decode = [w.decode_microbatch] if w.decode_microbatch else divisors
        return [MicroBatches(p, d) for p, d in itertools.product(prefill, decode)]

    @functools.cache  # noqa: B019 - lives as long as one plan's search
    def kernels(self, k: int, sizes: MicroBatches) -> StageKernels:
        """Variants that devices of type ``k`` use."""
        return self.pricing.kernels(self.types[k][0], sizes)

    @functools.cache  # noqa: B019
    def problem(self, sizes: MicroBatches) -> ChainProblem:
        """The chain problem of one pair of micro-batch sizes."""
        model, w, price = self.pricing.model, self.pricing.workload, self.pricing
        kinds, bits = range(len(self.types)), self.bits
        prefill = np.full((len(kinds), len(bits)), np.inf)
        decode = np.full_like(prefill, np.inf)
        edges = np.zeros((4, len(kinds)))
        for k in kinds:
            rank, kernels = self.types[k][0], self.kernels(k, sizes)
            for v, b in enumerate(bits):
                if f"{PREFILL}/linear/{b}" in kernels.table:
                    prefill[k, v] = price.seconds(rank, price.layer(kernels, b, PREFILL, sizes))
                    decode[k, v] = price.decode_layer_s(rank, kernels, b, sizes)
            edges[:, k] = [
                price.seconds(rank, price.embedding(PREFILL, sizes)),
                price.seconds(rank, price.embedding(DECODE, sizes)),
                price.seconds(rank, price.head(kernels, PREFILL, sizes)),
                price.seconds(rank, price.head(kernels, DECODE, sizes)),
            ]
        held = [static_bytes(model, w, 0, model.layers, (b,) * model.layers) for b in bits]
        # Layers are alike, so that a stage's bytes are its share of the whole model's.
        layer_bytes = np.array([(h["weights"] + h["kv_cache"]) / model.layers for h in held])

        def every_layer(table: FloatArray) -> FloatArray:
            return np.broadcast_to(table[:, None, :], (len(kinds), model.layers, len(bits)))

        both = np.ones(len(kinds))
        return ChainProblem(
            counts=np.array([len(t) for t in self.types]),
            prefill_s=every_layer(prefill),
            decode_s=every_layer(decode),
            memory_bytes=every_layer(np.broadcast_to(layer_bytes, prefill.shape)),
            capacity_bytes=self.capacity,
            omega=self.omega,
            first_prefill_s=edges[0],
            first_decode_s=edges[1],
            first_memory_bytes=both * held[0]["embedding"],
            last_prefill_s=edges[2],
            last_decode_s=edges[3],
            last_memory_bytes=both * held[0]["head"],
            fixed_memory_bytes=np.array(
                [
                    float(held[0]["buffers"] + workspace_bytes(model, w, sizes, device_kind(t[0])))
                    for t in self.types
                ]
            ),
            link_prefill_s=self._links(price.hidden_bytes(PREFILL, sizes), "bf16"),
            link_decode_s=self._links(price.hidden_bytes(DECODE, sizes), "bf16"),
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
        """Time of a hop between types; 0 where a type has no second device to be neighbour of."""
        table = np.zeros((len(self.types), len(self.types)))
        for a, b in itertools.product(range(len(self.types)), repeat=2):
            if a != b or len(self.types[a]) > 1:
                source, target = self.types[a][0], self.types[b][-1]
                table[a, b] = self.pricing.hop_s(source, target, payload_bytes, dtype)
        return table

    def decision(
        self, sizes: MicroBatches, assignment: ChainAssignment, *, limits_met: bool = True
    ) -> ServingDecision:
        """An assignment dealt to concrete ranks, the first free one of each type."""
        free = [list(ranks) for ranks in self.types]
        stages, omega = [], 0.0
        for stage in assignment.stages:
            rank = free[stage.device_type].pop(0)
            bits = tuple(self.bits[v] for v in stage.variants)
            layers = range(stage.start, stage.end)
            omega += float(self.omega[layers, stage.variants].sum())
            stages.append(
                StageDecision(
                    rank=rank.index, device=rank.label, start=stage.start, end=stage.end,
                    bits=bits,
                    kernels=self.kernels(stage.device_type, sizes).texts(set(bits)),
                )
            )  # fmt: skip
        every = [b for stage in stages for b in stage.bits]
        return ServingDecision(
            stages=tuple(stages), prefill_microbatch=sizes.prefill, decode_microbatch=sizes.decode,
            average_bits=sum(every) / len(every), omega=omega, limits_met=limits_met,
        )  # fmt: skip


def static_bytes(
    model: Model, workload: ServingWorkload, start: int, end: int, bits: tuple[int, ...]
) -> dict[str, int]:
    """What a stage holds throughout, by item; see `stage_bytes`."""
    return stage_bytes(
        model, start, end, [STORAGE[b][0] for b in bits], batch=workload.batch,
        positions=workload.prompt_tokens + workload.new_tokens,
    )  # fmt: skip


def workspace_bytes(model: Model, workload: ServingWorkload, sizes: MicroBatches, kind: str) -> int:
    """Temporary tensors of the largest pass and the buffers between stages.

    Per row in bf16: the residual stream and its norm, and the wider of attention (qkv twice,
    because the rotation copies, and the output) and MLP (up; gated: the activation and the product
    too). A processor that computes in fp32 casts the input and the output of a linear. Besides: a
    hidden state for every token in flight, the logits, and the largest linear once for kernels that
    unpack it: in bf16 by the fused ones of a GPU, else in fp32. A GPU's library keeps a buffer.

    Args:
        model: the model.
        workload: batch and lengths.
        sizes: of the micro-batches.
        kind: ``cpu`` or ``cuda``.
    """
    rows = max(sizes.prefill * workload.prompt_tokens, sizes.decode)
    width = {linear.name: linear.n for linear in model.linears}
    attention = 2 * width["qkv"] + model.heads * model.head_dim
    mlp = width["up"] + (2 if model.gated else 1) * model.ffn
    per_row = 2 * (3 * model.hidden + max(attention, mlp))
    if kind == "cpu":
        per_row += 4 * max(linear.n + linear.k for linear in model.linears)
    in_flight = 2 * workload.batch * (workload.prompt_tokens + 1) * model.hidden
    logits = 2 * max(sizes.prefill, sizes.decode) * model.vocab
    fused = kind == "cuda" and 3 not in workload.bits
    unpacked = (2 if fused else 4) * max(linear.n * linear.k for linear in model.linears)
    unpacked += _CUBLAS_BYTES if kind == "cuda" else 0
    return rows * per_row + in_flight + logits + unpacked


def capacities(cluster: Cluster) -> tuple[int, ...]:
    """What each rank may use, in bytes.

    Raises:
        MissingDataError: a device without a cap, profile or published memory.
    """
    found = []
    for rank in cluster.ranks():
        if rank.memory_bytes is None:
            raise MissingDataError(
                f"the memory of {rank.label} is not known",
                fix="give it as memory_bytes in the cluster",
            )
        found.append(rank.memory_bytes)
    return tuple(found)
