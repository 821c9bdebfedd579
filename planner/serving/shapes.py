"""The programs that serving a model can run on a device: what to measure before planning.

Micro-batch sizes are searched over every divisor of the batch, but times between measured sizes
interpolate well, so that at most three sizes of each phase are measured: the smallest, the largest
and the one in the middle. Devices that share a stage run the shapes of their shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from foreplan.cost_models.tensor_parallel import degrees, shard_model
from foreplan.datasets.experts import EXPERT_OPERATORS
from foreplan.datasets.kernels.registry import kernels_for, quantises_activations
from foreplan.datasets.models.attention_window import distinct_kinds
from foreplan.datasets.models.decoder_programs import (
    embedding_programs,
    head_programs,
    layer_programs,
)
from foreplan.datasets.models.latent_programs import attention_call
from foreplan.datasets.models.model import Model
from foreplan.datasets.program import Program, Variant
from foreplan.planner.serving.spec import CACHE_STORAGE, STORAGE, ServingWorkload


def serving_programs(
    model: Model, workload: ServingWorkload, device_kind: str, *, devices: int = 1
) -> list[Program]:
    """Programs of both phases with every kernel that the device kind has.

    Args:
        model: the model.
        workload: batch, lengths, allowed bits and how many devices share a stage.
        device_kind: ``cpu`` or ``cuda``.
        devices: most that may share a stage where the workload leaves it open (``auto``).

    Returns:
        Each program once, degree by degree in the order of the passes.

    Raises:
        SpecError: a degree of tensor parallelism that the model cannot be split by.
    """
    asked = workload.tensor_parallel
    found: dict[Program, None] = {}
    for degree in degrees(model, devices) if asked == "auto" else (asked,):
        found.update(dict.fromkeys(_programs(shard_model(model, degree), workload, device_kind)))
    return list(found)


def _programs(model: Model, workload: ServingWorkload, device_kind: str) -> Iterator[Program]:
    """Programs of one device's share, some of them again and again."""
    prompt, new = workload.prompt_tokens, workload.new_tokens
    passes = [(b, prompt, prompt) for b in _few(workload.batch, workload.prefill_microbatch)]
    if new > 1:
        contexts = sorted({prompt + 1, prompt + new - 1})
        sizes = _few(workload.batch, workload.decode_microbatch)
        passes += [(b, 1, context) for b in sizes for context in contexts]
    storages = {s for bits in workload.bits for s in STORAGE[bits]}
    for batch, queries, keys in passes:
        for wanted in _choices(device_kind, workload, model):
            for kind in distinct_kinds(model, prompt + new):
                yield from (
                    p for p, _ in layer_programs(model, batch, queries, keys, wanted, *kind)
                    if p.op not in ("linear", *EXPERT_OPERATORS)
                    or (p.variant.storage in storages and _runs(p, device_kind))
                )  # fmt: skip
            yield from (
                p for p, _ in head_programs(model, batch, wanted)
                if p.op != "linear" or p.variant.storage == "bf16"
            )  # fmt: skip
        yield from (p for p, _ in embedding_programs(model, batch, queries))


class _Choice:
    """Names one variant of linears, and of each kind of attention that the model has."""

    def __init__(self, table: Mapping[str, Variant]) -> None:
        self._table = table

    def __call__(self, op: str, dims: Mapping[str, int]) -> Variant:
        return self._table[op]


def _choices(device_kind: str, workload: ServingWorkload, model: Model) -> list[_Choice]:
    linears = [
        v for v in kernels_for("linear", device_kind)
        if workload.quantise_activations or not quantises_activations(v)
    ]  # fmt: skip
    bits = workload.caches if model.latent is None else (16,)  # latents are never quantised
    caches = {CACHE_STORAGE[b] for b in bits}
    asked = {attention_call(model, 1, queries, 2)[0] for queries in (1, 2)}
    each = {"linear": linears}
    for op in sorted(asked):
        each[op] = [v for v in kernels_for(op, device_kind) if v.storage in caches]
    most = max(map(len, each.values()))
    return [_Choice({op: v[i % len(v)] for op, v in each.items()}) for i in range(most)]


def _runs(item: Program, device_kind: str) -> bool:
    dims = item.dims
    shapes = [(dims["n"], dims["k"])] if item.op == "linear" else [
        (2 * dims["ffn"], dims["hidden"]), (dims["hidden"], dims["ffn"])
    ]  # fmt: skip
    return all(item.variant in kernels_for(item.op, device_kind, n=n, k=k) for n, k in shapes)


def _few(batch: int, fixed: int | None) -> list[int]:
    """The smallest, the middle and the largest divisor of the batch, or the fixed size."""
    if fixed is not None:
        return [fixed]
    divisors = [d for d in range(1, batch + 1) if batch % d == 0]
    return sorted({divisors[0], divisors[len(divisors) // 2], divisors[-1]})
