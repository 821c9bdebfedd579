"""Serving plans on unlike slices of two GPUs, run beside their baselines.

``python tests/benchmarks/serving_gpus.py profile DEVICE FOLDER MODEL...`` measures the programs of
the workload on one device; ``... plan FOLDER CASE...`` plans each case from measured, predicted and
roofline costs; ``... run FOLDER CASE...`` runs all of these and the baselines, interleaved, after
planning what is not planned yet, and prints one JSON line a decision, also of one that could not be
loaded, with the reason and its peak; ``... decisions FOLDER CASE...`` leaves the baselines out.
Weights are random, so that only decisions of equal average bits compare.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from foreplan.datasets.cluster import Cluster
from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.program import Program
from foreplan.datasets.specs import validate
from foreplan.datasets.timing.measuring import Effort
from foreplan.datasets.timing.profile_grid import ProfileGrid
from foreplan.datasets.timing.profiling import measure_profile
from foreplan.errors import ForeplanError
from foreplan.planner.api import plan
from foreplan.planner.load_workload import load_workload
from foreplan.planner.plan import Plan, load_plan
from foreplan.planner.serving.planner import ServingPlanner
from foreplan.planner.serving.shapes import serving_programs
from foreplan.planner.verify.verification import Verification
from foreplan.planner.verify.verify import verify

WORKLOAD = "batch=16,prompt_tokens=512,new_tokens=32,min_average_bits=8"
CACHE_8 = f"{WORKLOAD},kv_bits=8"
SMALL = "batch=4,prompt_tokens=32,new_tokens=8,min_average_bits=8"
#: Model, devices with their memory in GiB, workload, whether results are compared too.
CASES = {
    "1b-whole-32": ("llama-3.2-1b", {"cuda:0": 1.75, "cuda:1/sms=32": 2.0}, WORKLOAD, True),
    "8b-whole-32": ("llama-3.1-8b", {"cuda:0": 8.0, "cuda:1/sms=32": 8.0}, WORKLOAD, False),
    "8b-66-32": ("llama-3.1-8b", {"cuda:0/sms=66": 9.0, "cuda:1/sms=32": 6.5}, WORKLOAD, False),
    "1b-66-32": ("llama-3.2-1b", {"cuda:0/sms=66": 1.75, "cuda:1/sms=32": 2.0}, WORKLOAD, False),
    "1b-whole-66": ("llama-3.2-1b", {"cuda:0": 1.375, "cuda:1/sms=66": 1.375}, WORKLOAD, False),
    "8b-whole-66": ("llama-3.1-8b", {"cuda:0": 6.5, "cuda:1/sms=66": 6.5}, WORKLOAD, False),
    "1b-three": (
        "llama-3.2-1b", {"cuda:0": 1.25, "cuda:1/sms=32": 1.25, "cuda:2/sms=66": 1.25},
        WORKLOAD, False,
    ),
    "8b-three": (
        "llama-3.1-8b", {"cuda:0": 5.0, "cuda:1/sms=32": 5.0, "cuda:2/sms=66": 5.0},
        WORKLOAD, False,
    ),
    "1b-cache-8": (
        "llama-3.2-1b", {"cuda:0/sms=66": 1.75, "cuda:1/sms=32": 2.0}, CACHE_8, True
    ),
    "rehearsal": (
        "tiny-llama-random", {"cpu:threads=1": 0.04, "cpu:threads=1,isa=avx2": 0.04}, SMALL, True
    ),
}  # fmt: skip
#: Latency, bandwidth and source of messages, where a folder says them (`serving_receives.py`).
LINK = "link.json"
ROUNDS = 3
#: Limits of one run and of loading one decision: what hangs may not take the other decisions along.
RUN_S, LOAD_S = 20.0, 40.0


def file_of(device: str) -> str:
    """Name of a device's profile."""
    return "".join(c if c.isalnum() else "-" for c in device) + ".json"


def profile(device: str, folder: Path, models: list[str]) -> None:
    """Measure what serving the models runs; kernels that unpack by torch are left out."""
    name = DeviceName.parse(device)
    found: dict[Program, None] = {}
    for model in models:
        words = SMALL if name.kind == "cpu" else f"{WORKLOAD},kv_bits=auto"
        workload = load_workload("serving", words)
        for item in serving_programs(load_model(model), workload, name.kind):  # type: ignore[arg-type]
            slow = item.variant.kernel == "torch.dequant_linear" and name.kind == "cuda"
            if not slow:
                found[item] = None
    started = time.monotonic()
    made = measure_profile(
        name, ProfileGrid.exact(found), folder / file_of(device), rounds=1,
        effort=Effort(min_s=0.02, min_samples=7, max_s=0.2),
    )  # fmt: skip
    failed = [row.error for row in made.rows if row.status != "ok"]
    print(f"# {device}: {len(made.rows)} programs in {time.monotonic() - started:.0f} s, "
          f"{len(failed)} failed {failed[:1]}", flush=True)  # fmt: skip


def planned(folder: Path, case: str) -> Plan:
    """Plan one case, unless that was done."""
    path = folder / f"{case}.plan.json"
    if path.exists():
        return load_plan(path)
    model, memory, workload, _ = CASES[case]
    tier = {
        "group": "all", "scope": "host", "latency_s": 47e-6, "bandwidth_bytes_per_s": 398e9,
        "source": "measured 2026-11-21 over NCCL, docs/results/h200.md",
    }  # fmt: skip
    if "cpu" in next(iter(memory)):
        tier |= {"latency_s": 1e-4, "bandwidth_bytes_per_s": 2e9, "source": "assumed"}
    if (folder / LINK).exists():
        tier |= json.loads((folder / LINK).read_text(encoding="utf-8"))
    devices = [
        {"name": device, "profile": file_of(device), "memory_bytes": round(size * (1 << 30))}
        for device, size in memory.items()
    ]
    cluster = validate(Cluster, {"devices": devices, "tiers": [tier]}, "cluster")
    described = folder / f"{case}.yaml"
    described.write_text(cluster.to_yaml(), encoding="utf-8")
    started = time.monotonic()
    made = plan("serving", model, described, workload, beside=("predicted", "roofline"))
    made.save(path)
    print(f"# {case}: planned in {time.monotonic() - started:.0f} s; "
          f"{[r.name + ': ' + r.reason for r in made.rejected]}", flush=True)  # fmt: skip
    return made


def run(folder: Path, case: str, *, baselines: bool = True) -> None:
    """Verify one case."""
    made, compared = planned(folder, case), CASES[case][3]
    if not baselines:
        kept = tuple(a for a in made.alternatives if a.name.startswith("decided"))
        made, compared = made.model_copy(update={"alternatives": kept}), False
    ServingPlanner.modes = ServingPlanner.modes if compared else ()  # else in another case
    document = verified(case, made)
    if document is None:
        return
    (folder / f"{case}.verification.json").write_text(document.to_json(), encoding="utf-8")
    best = min(
        (c.measured_s for c in document.candidates if c.limits_met and c.measured_s is not None),
        default=None,
    )
    for c in document.candidates:
        row: dict[str, Any] = {
            "case": case, "name": c.name, "limits_met": c.limits_met,
            "predicted_s": c.predicted_s, "measured_s": c.measured_s, "error": c.error,
            "failure": c.failure,
        }  # fmt: skip
        if c.measured_s is not None:
            row["regret"] = None if best is None else round(c.measured_s / best - 1, 4)
            row["ranks"] = [rank.model_dump(mode="json") for rank in c.ranks]
        print(json.dumps(row), flush=True)
    for agreement in document.agreement:
        print(json.dumps({"case": case, **agreement.model_dump(mode="json")}), flush=True)


def verified(case: str, made: Plan) -> Verification | None:
    """Run a plan and its alternatives; where the plan itself fails, the next best in its place.

    `verify` has nothing to compare with where the plan it is given cannot be run.
    """
    started, name = time.monotonic(), "chosen"
    while True:
        try:
            result = verify(
                made, rounds=ROUNDS, tolerance=10.0, timeout_s=RUN_S, load_timeout_s=LOAD_S,
                progress=lambda text: print(f"# {time.monotonic() - started:.1f} {text}",
                                            flush=True),
            )  # fmt: skip
        except ForeplanError as error:
            print(json.dumps({"case": case, "name": name, "failure": str(error)}), flush=True)
            rest = [other for other in made.alternatives if other.limits_met]
            if not rest:
                return None
            name = rest[0].name
            print(f"# {name} stands for the plan that failed", flush=True)
            made = made.model_copy(update={
                "decision": rest[0].decision, "predicted": rest[0].predicted, "times": None,
                "alternatives": tuple(a for a in made.alternatives if a is not rest[0]),
            })  # fmt: skip
            continue
        return result.document


if __name__ == "__main__":
    word, first, *rest = sys.argv[1:]
    if word == "profile":
        profile(first, Path(rest[0]), rest[1:])
    else:
        for each in rest:
            try:
                if word == "plan":
                    planned(Path(first), each)
                else:
                    run(Path(first), each, baselines=word == "run")
            except ForeplanError as error:
                print(json.dumps({"case": each, "failure": str(error)}), flush=True)
