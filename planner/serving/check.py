"""Whether a serving decision, perhaps edited by hand, can be meant for this model and cluster."""

from __future__ import annotations

from foreplan.cost_models.tensor_parallel import shard_model
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.kernels.registry import DEVICE_KINDS, kernels_for
from foreplan.datasets.models.latent_programs import attention_call
from foreplan.datasets.models.model import Model
from foreplan.datasets.program import Variant
from foreplan.errors import SpecError
from foreplan.planner.serving.spec import (
    CACHE_STORAGE,
    STORAGE,
    ServingDecision,
    ServingWorkload,
    StageDecision,
)


def check_decision(
    model: Model, cluster: Cluster, workload: ServingWorkload, decision: ServingDecision
) -> None:
    """Check what the decision's own types cannot know.

    Raises:
        SpecError: another number of layers, a device that the cluster does not have or that the
            rank is not, bits without a storage, micro-batches that do not divide the batch, a
            kernel that is not named or that computes something else, a cache of other bits than
            the workload's or than its kernels read.
    """
    if decision.kv_bits not in workload.caches:
        raise SpecError(
            "decision.kv_bits", got=decision.kv_bits, expected=f"the workload's {workload.kv_bits}"
        )
    if decision.layers != model.layers:
        raise SpecError(
            "decision.stages", got=f"{decision.layers} layers", expected=f"{model.layers}"
        )
    every = cluster.ranks()
    ranks = len(every)
    for size in (decision.prefill_microbatch, decision.decode_microbatch):
        if workload.batch % size:
            raise SpecError(
                "decision", got=f"micro-batches of {size}", expected=f"divisors of {workload.batch}"
            )
    for i, stage in enumerate(decision.stages):
        where = f"decision.stages[{i}]"
        for rank in stage.ranks:
            if rank >= ranks:
                raise SpecError(f"{where}.rank", got=rank, expected=f"0..{ranks - 1}")
        _check_group(model, cluster, where, stage)
        device = every[stage.rank]
        if stage.device != device.label:
            raise SpecError(
                f"{where}.device", got=stage.device, expected=f"{device.label}, its rank's device"
            )
        unknown = sorted(set(stage.bits) - set(STORAGE))
        if unknown:
            raise SpecError(f"{where}.bits", got=unknown[0], expected=f"one of {sorted(STORAGE)}")
        needed = {f"{phase}/attention" for phase in ("prefill", "decode")}
        needed |= {f"{phase}/linear/{b}" for phase in ("prefill", "decode") for b in stage.bits}
        if stage.end == model.layers:
            needed |= {"prefill/head", "decode/head"}
        missing = sorted(needed - set(stage.kernels))
        if missing:
            raise SpecError(f"{where}.kernels", got=f"no {missing[0]}", expected="a variant for it")
        for name in sorted(needed):
            tokens = workload.prompt_tokens if name.startswith("prefill") else 1
            attends, _ = attention_call(model, 1, tokens, tokens)
            _check_kernel(where, name, stage.kernels[name], attends)
        _check_cache(where, stage, decision.kv_bits)


def _check_kernel(where: str, name: str, text: str, attends: str) -> None:
    """A kernel that computes what it is named for; on which kind of device, the runtime asks."""
    _, op, *bits = name.split("/")
    computes = attends if op == "attention" else "linear"
    known = dict.fromkeys(v for kind in DEVICE_KINDS for v in kernels_for(computes, kind))
    stored = STORAGE[int(bits[0])] if bits else None
    fitting = [v for v in known if stored is None or v.storage in stored]
    if Variant.parse(text) not in fitting:
        names = ", ".join(str(variant) for variant in fitting)
        raise SpecError(f"{where}.kernels: {name}", got=text, expected=f"one of {names}")


def _check_cache(where: str, stage: StageDecision, bits: int) -> None:
    """Both phases read the cache in the storage that memory was counted for."""
    quantised = CACHE_STORAGE[8]
    for phase in ("prefill", "decode"):
        text = stage.kernels[f"{phase}/attention"]
        if (Variant.parse(text).storage == quantised) != (bits == 8):
            raise SpecError(
                f"{where}.kernels: {phase}/attention", got=text,
                expected=f"a kernel that reads a cache of {CACHE_STORAGE[bits]}",
            )  # fmt: skip


def _check_group(model: Model, cluster: Cluster, where: str, stage: StageDecision) -> None:
    """Devices that share layers are alike and of one host, and can split this model."""
    shard_model(model, stage.degree)
    every = cluster.ranks()
    alike = {(every[r].host, every[r].name.any_index) for r in stage.ranks}
    if len(alike) > 1:
        raise SpecError(
            f"{where}.peers", got=", ".join(every[r].label for r in stage.ranks),
            expected="equal devices of one host",
        )  # fmt: skip
