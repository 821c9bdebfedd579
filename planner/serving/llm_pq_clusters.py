"""LLM-PQ's eleven clusters, planned from predicted costs: a simulation, no run.

Run as ``python -m foreplan.planner.serving.llm_pq_clusters -o FILE [--clusters 3 9] [--workloads
long short]``. For every cluster and workload the best plan of at least the quality of PipeEdge's
(its number of bits is the floor on the average) beside every baseline, all timed by the simulator.
FILE is written as results arise, and what it holds already is not planned again.

Clusters, batch and lengths are those of LLM-PQ's evaluation. Its GPUs' boards and links are not
said: SXM2 V100s and SXM A100s with NVLink among themselves, a host for each kind of GPU, and the
assumed network between hosts. Memory is LLM-PQ's: 95 % of what a board has free, less 430 MB of
context; temporaries are in the ledger here. BLOOM's positions are biases inside attention, which
cost nothing: its shape stands in as a model of learned positions.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from foreplan.cost_models.book import Profiles, cost_book
from foreplan.cost_models.quality.sensitivity import weight_sensitivity
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.inline_cluster import parse_devices
from foreplan.datasets.models.families import FAMILY_FACTS
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.model import Model
from foreplan.datasets.specs import load_document, validate
from foreplan.datasets.storage import folder_for, write_atomically
from foreplan.errors import ForeplanError, told
from foreplan.planner.base import Problem
from foreplan.planner.predict import Forecast
from foreplan.planner.serving.chain import ServingChains
from foreplan.planner.serving.llm_pq import llm_pq_baselines
from foreplan.planner.serving.planner import ServingPlanner
from foreplan.planner.serving.pricing import Pricing
from foreplan.planner.serving.spec import ServingDecision, ServingWorkload

#: Cluster to (model, devices).
CLUSTERS: Mapping[int, tuple[str, str]] = MappingProxyType(
    {
        1: ("opt-13b", "1xv100_sxm2_32gb@v"),
        2: ("opt-13b", "1xa100_sxm_40gb@a"),
        3: ("opt-30b", "3xt4@t,1xv100_sxm2_32gb@v"),
        4: ("opt-30b", "3xp100_pcie_12gb@p,1xv100_sxm2_32gb@v"),
        5: ("opt-66b", "4xt4@t,2xv100_sxm2_32gb@v"),
        6: ("opt-66b", "2xv100_sxm2_32gb@v,2xa100_sxm_40gb@a"),
        7: ("bloom-176b", "4xv100_sxm2_32gb@v,4xa100_sxm_40gb@a"),
        8: ("bloom-176b", "4xv100_sxm2_32gb@v,2xa100_sxm_80gb@a"),
        9: ("opt-30b", "4xt4@t"),
        10: ("opt-66b", "4xv100_sxm2_32gb@v"),
        11: ("bloom-176b", "4xa100_sxm_80gb@a"),
    }
)
#: Prompt and new tokens of the two sets; batch 32.
WORKLOADS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"long": (512, 100), "short": (128, 200)}
)
BATCH = 32
#: GiB that LLM-PQ counts for each board.
FREE_GIB: Mapping[str, float] = MappingProxyType(
    {"t4": 14.76, "p100_pcie_12gb": 11.91, "v100_sxm2_32gb": 31.74, "a100_sxm_40gb": 39.4,
     "a100_sxm_80gb": 79.3}
)  # fmt: skip
CONTEXT_BYTES = 430e6
PIPE_EDGE = "min-max split, most bits"
#: How `serving_baselines` says that two names mean one decision.
SAME = "the same decision as "


def model_of(name: str) -> Model:
    """A zoo model, or BLOOM-176B's shape (its ``config.json``: 70 layers of 14,336, 112 heads)."""
    if name != "bloom-176b":
        return load_model(name)
    facts = {
        **FAMILY_FACTS["gpt2"], "name": "bloom-176b-shape", "layers": 70, "hidden": 14336,
        "heads": 112, "kv_heads": 112, "head_dim": 128, "ffn": 57344, "vocab": 250880,
        "max_positions": 2048, "norm_eps": 1e-5, "tied": True, "dtype": "bf16",
        "family": "gpt2",
    }  # fmt: skip
    return validate(Model, facts, "bloom-176b")


def cluster_of(devices: str) -> Cluster:
    """The devices with LLM-PQ's memory."""
    cluster = parse_devices(devices, "cluster")
    entries = tuple(
        entry.model_copy(
            update={"memory_bytes": int(0.95 * FREE_GIB[str(entry.name)] * 2**30 - CONTEXT_BYTES)}
        )
        for entry in cluster.devices
    )
    return cluster.model_copy(update={"devices": entries})


def simulate_cluster(number: int, workload: str) -> dict[str, Any]:
    """Plan one cluster and its baselines.

    Returns:
        ``decisions`` by name with seconds, tokens a second, average bits, stages and micro-batches;
        ``ratio``: throughput of the plan over PipeEdge's at no fewer bits; ``gap``, ``lower_s`` and
        ``plan_s``, the seconds that planning took.

    Raises:
        ForeplanError: nothing fits.
    """
    planner = ServingPlanner()
    name, devices = CLUSTERS[number]
    prompt, new = WORKLOADS[workload]
    cluster, model = cluster_of(devices), model_of(name)
    book = cost_book(cluster, Profiles(), "predicted")
    asked = ServingWorkload(batch=BATCH, prompt_tokens=prompt, new_tokens=new, bits=(16, 8, 4))
    problem = Problem(model=model, cluster=cluster, workload=asked, costs=book, seed=0)

    def total_s(decision: ServingDecision) -> float:
        return Forecast.of(planner, problem, decision).total_s

    rivals = dict(planner.baselines(problem))
    edge = rivals[PIPE_EDGE]
    if isinstance(edge, str) and edge.startswith(SAME):
        edge = rivals[edge.removeprefix(SAME)]
    floor = None if isinstance(edge, str) else edge.average_bits
    held = dataclasses.replace(
        problem, workload=asked.model_copy(update={"min_average_bits": floor})
    )
    started = time.process_time()
    choice = planner.decide(held)
    plan_s = time.process_time() - started
    omega = weight_sensitivity(model, asked.bits)
    room = tuple(rank.capacity for rank in cluster.ranks())
    chains = ServingChains(Pricing(model, held.workload, book), cluster, room, omega)
    rivals |= llm_pq_baselines(chains, total_s)
    rivals = {"plan": choice.decision, **rivals}
    free = planner.decide(problem)
    rivals["plan without a floor on bits"] = free.decision
    shown = {
        name: _shown(decision, total_s(decision), BATCH * new)
        for name, decision in rivals.items()
        if not isinstance(decision, str)
    }
    left_out = {name: why for name, why in rivals.items() if isinstance(why, str)}
    ratio = None if isinstance(edge, str) else total_s(edge) / shown["plan"]["total_s"]
    return {
        "cluster": number, "devices": devices, "model": model.name, "workload": workload,
        "floor_bits": floor, "ratio": ratio, "gap": choice.bound.gap, "status": choice.bound.status,
        "plan_s": plan_s, "decisions": shown, "left_out": left_out,
    }  # fmt: skip


def _shown(decision: ServingDecision, total_s: float, tokens: int) -> dict[str, Any]:
    return {
        "total_s": total_s,
        "tokens_per_s": tokens / total_s,
        "average_bits": decision.average_bits,
        "limits_met": decision.limits_met,
        "microbatches": [decision.prefill_microbatch, decision.decode_microbatch],
        "stages": [
            [s.device, s.end - s.start, {str(b): s.bits.count(b) for b in sorted(set(s.bits))}]
            for s in decision.stages
        ],
    }


def main(arguments: Iterable[str] | None = None) -> None:
    """Plan the clusters that FILE lacks, write it after each, and print the table."""
    parser = argparse.ArgumentParser(description="LLM-PQ's clusters from predicted costs.")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument(
        "--clusters", nargs="+", type=int, choices=list(CLUSTERS), default=list(CLUSTERS)
    )
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    options = parser.parse_args(None if arguments is None else list(arguments))
    with told(), folder_for(options.output.parent):
        known = dict(load_document(options.output)) if options.output.exists() else {}
        for workload in options.workloads:
            for number in options.clusters:
                key = f"{number} {workload}"
                if key not in known:
                    try:
                        known[key] = simulate_cluster(number, workload)
                    except ForeplanError as error:
                        known[key] = {"error": str(error)}
                    write_atomically(options.output, json.dumps(known, indent=1) + "\n")
                print(_line(key, known[key]), flush=True)


def _line(key: str, found: Mapping[str, Any]) -> str:
    if "error" in found:
        return f"{key}: {found['error']}"
    plan = found["decisions"]["plan"]
    others = ", ".join(
        f"{name} {d['total_s'] / plan['total_s']:.3f} of its time at {d['average_bits']:.3g} bits"
        for name, d in found["decisions"].items()
        if name != "plan"
    )
    ratio = "no PipeEdge" if found["ratio"] is None else f"{found['ratio']:.3f} of PipeEdge"
    return (
        f"{key} (simulated): {plan['tokens_per_s']:.1f} tokens/s at {plan['average_bits']:.3g} "
        f"bits, {ratio}, gap {found['gap']:.1e}, {found['plan_s']:.1f} s; {others}"
    )


if __name__ == "__main__":
    main()
