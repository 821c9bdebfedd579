"""Random clusters and models through each planner: ``python -m tests.robustness.random_plans``.

Each case is a function of its planner and number, at roofline costs. Either there is a plan, which
is written, read back, scheduled and simulated again to what it predicts, or one line says why there
is none. Where that line says "infeasible", HiGHS is asked too: `infeasible` for the precision and
bubble planners, who must also find every plan that was made feasible; for the serving planner the
programme of ``solvers.chain_milp`` on every size of micro-batch, where the case is small. Outcomes
go to a journal (``--journal``) that a later run continues.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

from tests.robustness.infeasible import bubbles_feasible, precision_feasible

import foreplan
from foreplan.cost_models.book import Profiles, cost_book
from foreplan.datasets import device_zoo
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.specs import validate
from foreplan.errors import ForeplanError, InfeasibleError
from foreplan.planner.base import Problem
from foreplan.planner.plan import Plan, decision_of
from foreplan.planner.predict import Forecast
from foreplan.planner.registry import planner

MODELS = ("tiny-llama-random", "gpt2", "llama-3.2-1b", "qwen3-0.6b")
#: Simulated twice, times may differ by rounding alone.
TOLERANCE = 1e-9
#: Devices up to which the first of `MODELS`, of 8 layers, takes HiGHS seconds.
SMALL_DEVICES = 3
#: Outcomes of an "infeasible" that HiGHS was asked about.
CONFIRMED = "InfeasibleError confirmed by MILP"
OPEN = "InfeasibleError that HiGHS cannot confirm"
Case = tuple[str | None, Cluster, dict[str, Any]]


def cluster(random: Random, most: int) -> Cluster:
    """Zoo devices on hosts, some with less memory than they have, joined or not quite."""
    names = [n for n in device_zoo.names() if device_zoo.device(n).memory_bytes]
    devices = []
    for _ in range(random.randint(1, 3)):
        name = random.choice(names)
        whole = device_zoo.device(name).memory_bytes or 1
        cap = int(whole * 10 ** random.uniform(-4.0, 0.0)) if random.random() < 0.4 else None
        devices.append(
            {"name": name, "count": random.randint(1, max(1, most // 3)),
             "host": random.choice(("a", "b")),
             **({} if cap is None else {"memory_bytes": max(cap, 1 << 20)})}
        )  # fmt: skip
    tiers = [
        {"group": "all", "scope": scope, "latency_s": 10 ** random.uniform(-6, -3),
         "bandwidth_bytes_per_s": 10 ** random.uniform(7, 11.5), "source": "made up"}
        for scope in ("host", "network") if random.random() < 0.95
    ]  # fmt: skip
    return validate(Cluster, {"devices": devices, "tiers": tiers}, "random cluster")


def _serving(random: Random) -> Case:
    batch = 2 ** random.randint(0, 6)
    bits = random.sample((16, 8, 4, 3), random.randint(1, 4))
    workload: dict[str, Any] = {
        "batch": batch, "prompt_tokens": random.choice((1, 7, 64, 400)),
        "new_tokens": random.choice((1, 2, 5, 17)), "bits": bits,
        "quantise_activations": random.random() < 0.3,
    }  # fmt: skip
    if random.random() < 0.3:
        workload["min_average_bits"] = random.uniform(3, max(bits))
    if random.random() < 0.2:
        workload["max_omega"] = 10 ** random.uniform(-3, 1)
    if random.random() < 0.2:
        workload["theta_s"] = 10 ** random.uniform(-4, 1)
    if random.random() < 0.3:
        workload["prefill_microbatch"] = min(batch, 2 ** random.randint(0, 6))
    return random.choice(MODELS), cluster(random, 9), workload


def _precision(random: Random) -> Case:
    workload: dict[str, Any] = {
        "batch": 2 ** random.randint(0, 8), "network": "digits_mlp",
        "network_options": {"layers": random.randint(1, 4), "width": 2 ** random.randint(4, 9)},
        "optimizer": random.choice(("sgd", "adamw")), "indicator": "uniform",
        "precisions": random.choice((["fp32"], ["fp32", "bf16"], ["fp32", "bf16", "int8"])),
        "slack": random.choice((0.0, 0.0, 0.1)), "steps": 1,
        "bucket_bytes": 2 ** random.randint(10, 25), "max_nodes": 2000,
    }  # fmt: skip
    if random.random() < 0.3:
        workload["target_s"] = 10 ** random.uniform(-5, -1)
    return None, cluster(random, 6), workload


def _bubbles(random: Random) -> Case:
    heads = 2 ** random.randint(0, 3)
    pp = random.choice((1, 2, 2, 4))
    encoders = [
        {"name": f"e{k}", "tokens": random.choice((4, 16, 50)), "frozen": random.random() < 0.2,
         "recompute": random.random() < 0.2,
         "dims": {"layers": random.randint(1, 4), "hidden": 32 * heads, "heads": heads}}
        for k in range(random.choice((1, 1, 2)))
    ]  # fmt: skip
    workload: dict[str, Any] = {
        "encoders": encoders, "sequence_length": random.choice((128, 256)),
        "backbone": {"layers": random.randint(pp, 8), "hidden": 64 * heads, "heads": heads,
                     "vocab": 512, "gated": random.random() < 0.5},
        "microbatches": random.choice((1, 2, 4, 6)), "microbatch": random.choice((1, 2)),
        "schedule": random.choice(("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2")),
        "sharded_optimizer": random.random() < 0.5,
        "recompute": random.choice(("none", "selective", "full")),
    }  # fmt: skip
    if random.random() < 0.8:
        workload["plan"] = {"pp": pp, "dp": random.choice((1, 1, 2)),
                            "tp": random.choice((1, 1, 2))}  # fmt: skip
    return None, cluster(random, 12), workload


MAKERS: Mapping[str, Callable[[Random], Case]] = MappingProxyType(
    {"serving": _serving, "precision": _precision, "bubbles": _bubbles}
)


def run(kind: str, number: int) -> str:
    """Plan a case; ``planned``, or the class of the error, with what a check added.

    Raises:
        AssertionError: a plan that does not simulate to its prediction, or a feasible "infeasible".
    """
    model, where, workload = MAKERS[kind](Random(f"{kind}/{number}"))
    try:
        made = foreplan.plan(kind, model, where, workload, costs="roofline", seed=number)
    except ForeplanError as error:
        refused = error
    else:
        again = Plan.model_validate_json(made.to_json())
        assert again == made, "another plan when read back"
        _simulates(again)
        if kind == "precision":
            timed = again.workload.get("target_s") is not None
            assert precision_feasible(_problem(again), timed=timed), "not even a point for HiGHS"
        elif kind == "bubbles":
            assert bubbles_feasible(_problem(again)), "not even a point for HiGHS"
        return "planned"
    assert len(str(refused).splitlines()) == 1
    small = kind != "serving" or (len(where.ranks()) <= SMALL_DEVICES and model == MODELS[0])
    if not (isinstance(refused, InfeasibleError) and small):
        return type(refused).__name__
    if kind == "serving":
        assert _really_infeasible(model, where, workload), f"feasible after all: {refused}"
        return CONFIRMED
    problem = _posed(kind, model, where, workload)
    if kind == "precision":
        # A refusal for lack of memory has to hold without the target.
        timed = "s a step" in str(refused)
        assert not precision_feasible(problem, timed=timed), f"feasible after all: {refused}"
        return CONFIRMED
    return OPEN if bubbles_feasible(problem) else CONFIRMED


def _posed(
    kind: str, model: str | None, where: Cluster, workload: dict[str, Any], seed: int = 0
) -> Problem[Any]:
    chosen = planner(kind)
    asked = validate(chosen.workload_type, workload, "workload")
    costs = cost_book(where, Profiles(), "roofline", given=chosen.given(asked))
    return Problem(None if model is None else load_model(model), where, asked, costs, seed)


def _problem(plan: Plan) -> Problem[Any]:
    chosen = planner(plan.kind)
    asked = validate(chosen.workload_type, plan.workload, "workload")
    costs = cost_book(plan.cluster, Profiles(), "roofline", given=chosen.given(asked))
    return Problem(plan.model, plan.cluster, asked, costs, plan.provenance.seed)


def _simulates(plan: Plan) -> None:
    """Every decision of the plan simulates to what the plan predicts of it."""
    chosen, problem = planner(plan.kind), _problem(plan)
    told = Forecast(chosen, problem, decision_of(plan)).prediction()
    assert abs(told.total_s - plan.predicted.total_s) <= TOLERANCE * told.total_s, (
        told.total_s, plan.predicted.total_s,
    )  # fmt: skip
    for rank in told.ranks:
        held = sum(rank.memory_bytes.values())
        assert rank.capacity_bytes is None or held <= rank.capacity_bytes, "beyond its memory"


def _really_infeasible(model: str | None, where: Cluster, workload: dict[str, Any]) -> bool:
    from foreplan.planner.serving.planner import ServingPlanner
    from foreplan.solvers.chain_milp import solve_milp
    from foreplan.solvers.solution import SolutionStatus

    chains = ServingPlanner()._chains(_posed("serving", model, where, workload))
    return all(
        solve_milp(chains.problem(sizes)).status is SolutionStatus.INFEASIBLE
        for sizes in chains.sizes()
    )


def main() -> int:
    """Run the command; 1 where a case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", action="append", choices=sorted(MAKERS))
    parser.add_argument("--cases", type=int, default=20, help="of each planner")
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--journal", type=Path, help="JSON lines; what is in it is not run again")
    chosen = parser.parse_args()
    known: dict[tuple[str, int], str] = {}
    if chosen.journal is not None and chosen.journal.exists():
        for line in chosen.journal.read_text().splitlines():
            entry = json.loads(line)
            known[entry["kind"], entry["case"]] = entry["outcome"]
    failed = False
    for kind in chosen.kind or MAKERS:
        start, counts = time.process_time(), Counter[str]()
        for number in range(chosen.first, chosen.first + chosen.cases):
            outcome = known.get((kind, number))
            if outcome is None:
                try:
                    outcome = run(kind, number)
                except Exception as error:
                    frame = traceback.extract_tb(error.__traceback__)[-1]
                    at = f"{Path(frame.filename).name}:{frame.lineno}"
                    outcome = f"FAILED {type(error).__name__} at {at}: {error}"[:300]
                if chosen.journal is not None:
                    with chosen.journal.open("a") as stream:
                        entry = {"kind": kind, "case": number, "outcome": outcome}
                        stream.write(json.dumps(entry) + "\n")
            if outcome.startswith("FAILED"):
                print(f"{kind} {number}: {outcome}", flush=True)
                failed, outcome = True, "FAILED"
            counts[outcome] += 1
        seconds = round(time.process_time() - start, 1)
        print(json.dumps({"kind": kind, **counts, "cpu_s": seconds}), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
