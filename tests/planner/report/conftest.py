"""A plan and its timelines, made without any planner: what a report must be able to show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from foreplan.cost_models.costs import CostBook, HostLaunch, Segment
from foreplan.cost_models.schedule_builder import ScheduleBuilder
from foreplan.cost_models.simulator import simulate
from foreplan.cost_models.timeline import Timeline
from foreplan.datasets.models.model_zoo import zoo_model
from foreplan.datasets.specs import validate
from foreplan.planner.plan import Plan
from foreplan.planner.verify.verification import Verification

CLUSTER = {
    "devices": [
        {"name": "cuda:0/sms=64", "host": "hosta", "memory_bytes": "16 GiB"},
        {"name": "t4", "host": "hosta"},
        {"name": "cpu:threads=2,isa=avx2", "host": "hostb", "memory_bytes": "12 GiB"},
    ],
    "tiers": [
        {"group": "hosta", "scope": "host", "latency_s": "10 us",
         "bandwidth_bytes_per_s": "12 GB/s", "source": "measured"},
        {"group": "all", "scope": "network", "latency_s": "60 us", "emulated": True,
         "bandwidth_bytes_per_s": "1 Gbit/s", "source": "measured, one channel"},
    ],
    "assumptions": ["t4 has 15 GiB for a plan: 1 GiB goes to the driver"],
}  # fmt: skip
DEVICES = ("hosta/cuda:0/sms=64", "hosta/t4", "hostb/cpu:threads=2,isa=avx2")
PREFILL_S, DECODE_S = (0.021, 0.040, 0.055), (0.0031, 0.0042, 0.0049)


def serving_timeline(steps: int = 24, microbatches: int = 4) -> Timeline:
    """Prefill and decode of three stages with transfers, simulated with given times."""
    builder = ScheduleBuilder(DEVICES)
    given = {HostLaunch(0): 0.0, Segment("hop"): 0.0011}
    for stage in range(3):
        given[Segment(f"prefill{stage}")] = PREFILL_S[stage]
        given[Segment(f"decode{stage}")] = DECODE_S[stage]
    back: dict[int, int] = {}
    for step in range(steps):
        phase = "decode" if step else "prefill"
        for batch in range(microbatches):
            arrived = (back[batch],) if batch in back else ()
            for stage in range(3):
                where = {"stage": stage, "microbatch": batch, "step": step}
                done = builder.add(
                    phase, stage, Segment(f"{phase}{stage}"), dependencies=arrived, **where
                )
                target = (stage + 1) % 3
                sent = builder.add(
                    "send", stage, Segment("hop"), peer=target, dependencies=(done,),
                    resources=(f"link:{stage}>{target}",), **where,
                )  # fmt: skip
                where["stage"] = target
                arrived = (
                    builder.add(
                        "recv", target, HostLaunch(0), peer=stage, dependencies=(sent,),
                        resources=(), **where,
                    ),
                )  # fmt: skip
            back[batch] = arrived[0]
    return simulate(builder.build(), CostBook((), given=given))


@pytest.fixture(scope="session")
def timeline() -> Timeline:
    return serving_timeline()


@pytest.fixture(scope="session")
def measured(timeline: Timeline) -> Timeline:
    """The same schedule, every compute action some percent slower, starting at 0.5 s."""
    stretch = 1.05 + 0.02 * np.sin(np.arange(len(timeline.schedule)))
    start = 0.5 + timeline.start_s * 1.05
    length = (timeline.end_s - timeline.start_s) * stretch * 0.95
    return replace(timeline, start_s=start, end_s=start + length, kind="measured")


def plan_document(timeline: Timeline, **changes: object) -> dict[str, object]:
    """A serving plan's document around a timeline."""
    total = timeline.makespan_s
    memory = [
        {"weights": 11_300_000_000, "kv_cache": 2_100_000_000, "workspace": 400_000_000},
        {"weights": 12_000_000_000, "kv_cache": 3_700_000_000, "workspace": 330_000_000},
        {"weights": 3_000_000_000, "kv_cache": 800_000_000, "head": 262_144_000},
    ]
    ranks = [
        {
            "device": device, "compute_s": e.compute_s, "communication_s": e.communication_s,
            "bubble_s": e.bubble_s, "memory_bytes": items, "capacity_bytes": capacity,
            "cause_s": {"linear": 0.7 * e.compute_s, "attention": 0.2 * e.compute_s,
                        "norm": 0.06 * e.compute_s, "collective": 0.02},
            "phase_s": {op: float(timeline.total_s(op)[rank]) for op in ("prefill", "decode")},
        }
        for rank, (device, e, items, capacity) in enumerate(
            zip(DEVICES, timeline.exposure(), memory, (16 << 30, 15 << 30, 12 << 30), strict=True)
        )
    ]  # fmt: skip
    predicted = {
        "total_s": total, "low_s": 0.93 * total, "high_s": 1.09 * total,
        "metrics": {"throughput_tokens_per_s": 16 * 24 / total, "time_to_first_token_s": 0.28,
                    "average_bits": 10.5, "omega": 0.38},
        "ranks": ranks,
    }  # fmt: skip
    each = {"attention": "bf16/bf16/torch.sdpa", "head": "bf16/bf16/torch.linear",
            "linear/16": "bf16/bf16/torch.linear",
            "linear/8": "int8/bf16/foreplan.fragment_linear"}  # fmt: skip
    kernels = {f"{phase}/{op}": k for phase in ("prefill", "decode") for op, k in each.items()}
    stages = [
        {"rank": k, "device": device, "start": start, "end": end, "kernels": kernels,
         "bits": [16] * head + [8] * (end - start - head)}
        for k, (device, start, end, head) in enumerate(
            zip(DEVICES, (0, 14, 28), (14, 28, 32), (8, 2, 0), strict=True)
        )
    ]  # fmt: skip
    decision = {"stages": stages, "prefill_microbatch": 4, "decode_microbatch": 4,
                "average_bits": 10.5, "omega": 0.38, "limits_met": True}  # fmt: skip
    slower = {**predicted, "total_s": 1.31 * total, "low_s": 1.2 * total, "high_s": 1.4 * total}
    faster = {**predicted, "total_s": 0.82 * total, "low_s": 0.8 * total, "high_s": 0.9 * total}
    return {
        "schema": "foreplan.plan/1",
        "kind": "serving",
        "model": zoo_model("llama-2-7b").model_dump(mode="json"),
        "cluster": CLUSTER,
        "workload": {"batch": 16, "prompt_tokens": 512, "new_tokens": 24, "bits": [16, 8, 4],
                     "min_average_bits": 10.4, "max_omega": 0.9, "theta_s": 0.0},
        "decision": decision,
        "predicted": predicted,
        "alternatives": [
            {"name": "int4 everywhere", "decision": {**decision, "limits_met": False},
             "limits_met": False, "predicted": faster},
            {"name": "even split", "decision": decision, "predicted": slower},
        ],
        "rejected": [{"name": "all on t4", "reason": "rank 1 (hosta/t4) needs 18.2 GiB of 15 GiB"}],
        "confidence": {
            "probability_best": 0.75, "draws": 64, "runner_up": "layers 15 + 13 + 4",
            "share": {"even split": 0.0625, "layers 15 + 13 + 4": 0.125},
            "measure_next": [
                {"program": "linear@int8/bf16/weight_only", "device": "t4", "source": "roofline",
                 "low": 0.5, "high": 2.0, "probability_best": 0.9},
            ],
        },
        "what_if": [
            {"limit": "memory of t4", "relaxed": 0.1, "total_s": 0.94 * total, "gain": 0.06},
            {"limit": "min_average_bits", "relaxed": 0.1, "total_s": total, "gain": 0.0},
        ],
        "bound": {"status": "optimal", "lower_s": 0.99 * total, "gap": 0.006,
                  "solver": "chain_partition", "evaluations": 1234},
        "verify": {"backend": "gloo", "ranks": 3, "tolerance": 0.1},
        "assumptions": ["every prompt is padded to prompt_tokens",
                        "llama-2-7b has random weights: times are real, tokens mean nothing"],
        "provenance": {"foreplan": "0.1.0", "costs": "measured", "seed": 0,
                       "source_share": {"measured": 0.71, "interpolated": 0.2, "roofline": 0.09},
                       "profiles": {"hosta/t4": "ab" * 32}},
        **changes,
    }  # fmt: skip


@pytest.fixture(scope="session")
def make_plan(timeline: Timeline) -> Callable[..., Plan]:
    def make(**changes: object) -> Plan:
        return validate(Plan, plan_document(timeline, **changes), "sample")

    return make


@pytest.fixture(scope="session")
def plan(make_plan: Callable[..., Plan]) -> Plan:
    return make_plan()


@pytest.fixture(scope="session")
def bare_plan(make_plan: Callable[..., Plan]) -> Plan:
    """A plan of another kind: no model, no stages, no alternatives, hardly any figures."""
    ranks = [{"device": "hosta/t4", "compute_s": 1.0, "communication_s": 0.0, "bubble_s": 0.5}]
    predicted = {"total_s": 1.5, "low_s": 1.5, "high_s": 1.5, "ranks": ranks}
    return make_plan(
        kind="local-sgd", model=None, workload={"max_error": 0.1}, decision={"tau": 4},
        predicted=predicted, alternatives=[], rejected=[], assumptions=[],
        confidence={"probability_best": 1.0, "draws": 0}, what_if=None,
        bound={"status": "heuristic", "lower_s": None, "gap": None, "solver": "enumerate"},
        provenance={"foreplan": "0.1.0", "costs": "roofline", "seed": 0},
    )  # fmt: skip


def verification_document(plan: Plan, measured: Timeline) -> dict[str, object]:
    """A run of `plan_document`'s plan: one alternative measured, one that failed, one rival."""
    total = measured.makespan_s
    ranks = []
    for rank, said in enumerate(plan.predicted.ranks):
        busy = measured.busy_s()[rank]
        phases = [
            {"op": op, "predicted_s": value, "measured_s": 1.04 * value, "error": 0.04 / 1.04}
            for op, value in said.phase_s.items()
        ]
        memory = [
            {"item": item, "predicted_bytes": size, "held_bytes": int(1.01 * size)}
            for item, size in said.memory_bytes.items()
        ]
        ranks.append(
            {"device": said.device, "predicted_s": said.compute_s, "measured_s": busy,
             "error": abs(said.compute_s - busy) / busy, "phases": phases, "memory": memory,
             "held_bytes": sum(said.memory_bytes.values()) + (300 << 20)}
        )  # fmt: skip
    predicted = plan.predicted.total_s
    chosen = {
        "name": "chosen", "role": "chosen", "predicted_s": predicted, "measured_s": total,
        "p10_s": 0.98 * total, "p90_s": 1.03 * total, "rounds_s": [0.98 * total, total],
        "error": abs(predicted - total) / total, "ranks": ranks,
    }  # fmt: skip
    even = {
        "name": "even split", "role": "alternative", "predicted_s": 1.31 * predicted,
        "measured_s": 1.29 * total, "p10_s": 1.27 * total, "p90_s": 1.33 * total, "error": 0.03,
    }  # fmt: skip
    rival = {
        "name": "rival 1", "role": "rival", "predicted_s": 1.04 * predicted,
        "measured_s": 0.99 * total, "p10_s": 0.97 * total, "p90_s": 1.01 * total, "error": 0.05,
    }  # fmt: skip
    failed = {
        "name": "int4 everywhere", "role": "alternative", "limits_met": False,
        "predicted_s": 0.82 * predicted, "failure": "rank 1: out of memory at 1decode0.3",
    }  # fmt: skip
    return {
        "schema": "foreplan.verification/1",
        "plan_digest": plan.digest,
        "kind": plan.kind,
        "backend": "gloo",
        "machine": {"cpu": "Example CPU @ 2.1 GHz", "cores": 8, "load_before": 0.4,
                    "load_after": 3.1, "devices": []},
        "rounds": 5,
        "tolerance": 0.1,
        "candidates": [chosen, even, rival, failed],
        "agreement": [
            {"mode": "reference", "passed": True, "exact": True, "details": {"equal_tokens": 1.0}},
            {"mode": "fast", "passed": True, "exact": False, "details": {"equal_top1": 0.995}},
        ],
        "regret": 0.0101,
        "rank_correlation": 0.9,
        "speedup": {"even split": 1.29},
        "passed": True,
        "notes": ["llama-2-7b has random weights: tokens mean nothing",
                  "the host had other load during the run"],
    }  # fmt: skip


@pytest.fixture(scope="session")
def make_verification(plan: Plan, measured: Timeline) -> Callable[..., Verification]:
    def make(**changes: object) -> Verification:
        document = verification_document(plan, measured) | changes
        return validate(Verification, document, "sample run")

    return make


@pytest.fixture(scope="session")
def verification(make_verification: Callable[..., Verification]) -> Verification:
    return make_verification()
