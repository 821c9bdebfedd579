"""Stages on a GPU: loaded under a cap, shards of layers, experts; skipped without one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Literal

import pytest
import torch

from foreplan.datasets.cluster import Cluster
from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.models.decoder_memory import stage_bytes
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.model import Model
from foreplan.datasets.specs import validate
from foreplan.planner.serving.kernels import ServingKernels, single_process_tokens
from foreplan.planner.serving.pipeline import stage_kernels
from foreplan.planner.serving.pricing import MicroBatches
from foreplan.planner.serving.spec import ServingDecision, ServingWorkload, StageDecision
from foreplan.planner.serving.workspace import StageWorkspace
from foreplan.planner.verify.placement import GPU_ALLOWANCE_BYTES, Seat, cap_memory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LINEARS = {
    16: "bf16/bf16/torch.linear",
    8: "int8/bf16/foreplan.fragment_linear",
    4: "int4/bf16/foreplan.fragment_linear",
}
GPU = Seat(DeviceName.parse("cuda:0"), torch.device("cuda:0"))


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """No cap behind a test, and before it no memory of others: a rank's process has none.

    torch keeps 32 MiB of cuBLAS for every stream that ever multiplied, so for the recording stream
    of every stage that was ever loaded here.
    """
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated()
    print(f"MiB of former tests: {(before - left) >> 20} for cuBLAS, {left >> 20} else")
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, GPU.device)


def decided(
    model: Model, bits: tuple[int, ...], workload: ServingWorkload, peers: tuple[int, ...] = ()
) -> ServingDecision:
    prefix = {16: "bf16/bf16/torch.", 8: "int8/bf16/torch.dequant_"}[workload.kv_bits]
    attention = prefix + (
        "sink_sdpa" if model.sinks else "capped_bmm" if model.score_cap else "sdpa"
    )
    table = {f"{phase}/linear/{b}": LINEARS[b] for phase in ("prefill", "decode") for b in bits}
    for phase in ("prefill", "decode"):
        table |= {f"{phase}/attention": attention, f"{phase}/head": LINEARS[16]}
    stage = StageDecision(
        rank=0, device="localhost/cuda:0", start=0, end=model.layers, bits=bits, kernels=table,
        peers=peers,
    )  # fmt: skip
    return ServingDecision(
        stages=(stage,), prefill_microbatch=workload.batch, decode_microbatch=workload.batch,
        average_bits=sum(bits) / len(bits), omega=0.0, kv_bits=workload.kv_bits,
    )  # fmt: skip


@pytest.mark.parametrize("kv_bits", [16, 8])
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize(
    "scores",
    [{}, {"sinks": True}, {"score_cap": 50.0}, {"sinks": True, "sliding_window": 50}],
    ids=str,
)
def test_a_stage_is_loaded_and_runs_within_what_it_was_planned_to_hold(
    scores: dict[str, object], bits: int, kv_bits: Literal[16, 8]
) -> None:
    model = load_model("llama-3.2-1b").model_copy(update={"layers": 4, **scores})
    workload = ServingWorkload(batch=4, prompt_tokens=128, new_tokens=4, kv_bits=kv_bits)
    storage = {16: "bf16", 8: "int8", 4: "int4"}
    held = stage_bytes(
        model, 0, 4, [storage[bits]] * 4, batch=4, positions=132, cache_storage=storage[kv_bits]
    )
    decision = decided(model, (bits,) * 4, workload)
    table = stage_kernels(decision.stages[0]).table
    space = StageWorkspace(model, workload, MicroBatches(4, 4), "cuda", table)
    ledger = sum(held.values()) + space.stage_bytes(0, 4, (bits,) * 4, held["kv_cache"])
    cap_memory(GPU, ledger)
    torch.cuda.reset_peak_memory_stats()
    tokens = single_process_tokens(
        model, validate(Cluster, {"devices": [{"name": "cuda:0"}]}, "cluster"), workload, decision,
        "fast", 0,
    )["tokens"]  # fmt: skip
    held_most, taken = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print(f"{bits} bits: MiB planned {ledger >> 20}, held {held_most >> 20}, taken {taken >> 20}")
    assert held_most <= ledger
    assert taken <= ledger + GPU_ALLOWANCE_BYTES
    assert len(tokens) == 4


def narrow(name: str, **changes: object) -> Model:
    base = {"layers": 2, "hidden": 128, "head_dim": 32, "heads": 4, "kv_heads": 2, "ffn": 256,
            "vocab": 128}  # fmt: skip
    return load_model(name).model_copy(update=base | changes)


def mixture() -> Model:
    model = narrow("mixtral-8x7b")
    assert model.experts is not None
    return model.model_copy(
        update={"experts": model.experts.model_copy(update={"count": 4, "ffn": 128})}
    )


def narrow_of(kind: str) -> Model:
    """A model whose layers are of a kind; prompts of 6 tokens are beyond its window, if any."""
    window = {"sliding_window": 4, "window_layers": (1,)}
    if kind == "experts":
        return mixture()
    if kind == "sinks":
        model = narrow("gpt-oss-20b", **window)
        assert model.experts is not None
        few = model.experts.model_copy(update={"count": 4, "active": 2, "ffn": 128})
        return model.model_copy(update={"experts": few})
    return narrow("gemma-2-2b", **window) if kind == "capped" else narrow("llama-3-8b")


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("kind", ["dense", "experts", "sinks", "capped"])
@pytest.mark.parametrize("degree", [1, 2])
def test_a_gpu_computes_what_the_processor_does(kind: str, degree: int, bits: int) -> None:
    """The same quantised weights in fp32, in one process; shards are summed as a library would."""
    model = narrow_of(kind)
    workload = ServingWorkload(batch=2, prompt_tokens=6, new_tokens=3)
    cluster = validate(Cluster, {"devices": [{"name": "cuda:0"}, {"name": "cuda:1"}]}, "cluster")
    decision = decided(model, (bits,) * 2, workload, tuple(range(1, degree)))
    gpu = single_process_tokens(model, cluster, workload, decision, "reference", 0)
    plain = {16: "bf16/bf16/torch.linear", 8: "int8/bf16/torch.int8pack_mm",
             4: "int4/bf16/torch.int4pack_mm"}  # fmt: skip
    (stage,) = decision.stages
    there = {k: plain[bits] if "/linear/" in k else v for k, v in stage.kernels.items()}
    host = stage.model_copy(update={"device": "localhost/cpu", "kernels": there})
    expected = single_process_tokens(
        model, cluster, workload, decision.model_copy(update={"stages": (host,)}), "reference", 0
    )
    assert gpu == expected
    fast = single_process_tokens(model, cluster, workload, decision, "fast", 0)
    assert len(fast["tokens"]) == 2


def test_messages_arrive_where_other_processes_can_open_it() -> None:
    model = narrow("llama-3-8b")
    workload = ServingWorkload(batch=2, prompt_tokens=6, new_tokens=3)
    decision = decided(model, (16, 16), workload)
    front = decision.stages[0].model_copy(update={"end": 1, "bits": (16,)})
    back = decision.stages[0].model_copy(update={"rank": 1, "start": 1, "bits": (16,)})
    decision = decision.model_copy(update={"stages": (front, back)})
    kernels = ServingKernels(model, workload, decision, 1, "fast", 0)
    inside = {s["address"] for s in torch.cuda.memory_snapshot() if s.get("is_expandable")}
    hidden = {t.untyped_storage().data_ptr() for t in kernels._hidden.values()}
    assert hidden
    assert not hidden & inside
