"""`plan_readers`: plans, their workloads, verifications and tables of quality."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.robustness.mutations import as_yaml
from tests.robustness.reader import Read, Reader

import foreplan
from foreplan.planner.plan import Plan

_CPU = {
    "devices": [
        {"name": "cpu:threads=1,isa=avx2", "memory_bytes": 1 << 30},
        {"name": "cpu:threads=1", "memory_bytes": 1 << 30},
    ],
    "tiers": [
        {"group": "all", "scope": "host", "latency_s": 1e-4, "bandwidth_bytes_per_s": 2e9,
         "source": "made up"}
    ],
    "contention": [{"kind": "memory", "factors": {"2": 1.2}}],
}  # fmt: skip
_BUBBLES: dict[str, Any] = {
    "encoders": [{"name": "v", "dims": {"layers": 2, "hidden": 64, "heads": 4}, "tokens": 16}],
    "backbone": {"layers": 4, "hidden": 128, "heads": 8, "vocab": 256},
    "sequence_length": 64, "microbatches": 2, "plan": {"pp": 2},
}  # fmt: skip
WORKLOADS: Mapping[str, dict[str, Any]] = {
    "serving": {"batch": 2, "prompt_tokens": 8, "new_tokens": 3, "bits": [16, 8]},
    "precision": {"batch": 8, "network": "digits_mlp", "indicator": "uniform",
                  "precisions": ["fp32", "bf16"]},
    "bubbles": _BUBBLES,
}  # fmt: skip


@functools.cache
def _made(kind: str) -> Plan:
    model = "tiny-llama-random" if kind == "serving" else None
    return foreplan.plan(kind, model, "2xl4", WORKLOADS[kind], costs="roofline")


@functools.cache
def plan_text(kind: str) -> str:
    """A plan of each kind on two processors, times of the roofline of two L4."""
    document = json.loads(_made(kind).to_json().replace("localhost/l4#", "localhost/x#"))
    del document["provenance"]["planned_for"]  # the tests' own edits are to be read
    labels = ("localhost/cpu:threads=1,isa=avx2", "localhost/cpu:threads=1")
    text = json.dumps(document | {"cluster": _CPU})
    for number, label in enumerate(labels):
        text = text.replace(f"localhost/x#{number}", label)
    return text


def use_plan(path: Path) -> None:
    """Read a plan and do with it what each command does, but for running it."""
    from foreplan.errors import ForeplanError
    from foreplan.planner.export import export_plan, targets
    from foreplan.planner.plan import load_plan
    from foreplan.planner.report.files import write_report
    from foreplan.planner.report.tables import plan_tables
    from foreplan.planner.verify.verify import verify

    plan = load_plan(path)
    plan.to_frame()
    plan._repr_html_()
    steps: list[Callable[[], Any]] = [
        lambda: plan_tables(plan),
        lambda: write_report(plan, path.with_suffix(".html"), trace=path.with_suffix(".trace")),
        lambda: verify(plan, dry_run=True),
    ]
    steps += [
        functools.partial(export_plan, plan, target, path.parent / target) for target in targets()
    ]
    for step in steps:
        # A plan can be sound and yet not for this target or this machine.
        with contextlib.suppress(ForeplanError):
            step()


@functools.cache
def plan_and_run() -> tuple[bytes, bytes]:
    """A plan with a verification of it."""
    from tests.planner.report.conftest import (
        plan_document,
        serving_timeline,
        verification_document,
    )

    from foreplan.datasets.specs import validate
    from foreplan.planner.verify.verification import Verification

    timeline = serving_timeline(steps=3)
    plan = validate(Plan, plan_document(timeline), "plan")
    run = validate(Verification, verification_document(plan, timeline), "run")
    return plan.to_json().encode(), run.to_json().encode()


def _quality() -> Any:
    """A table of losses of the demo model, which has random weights, with a curve."""
    from foreplan.cost_models.quality.quality_table import weights_digest
    from foreplan.datasets.models.load_model import load_model

    model = load_model("demo-llama-random")
    return {
        "schema": "foreplan.quality/1", "model": model.name,
        "weights_digest": weights_digest(model), "indicator": "measured_kl",
        "bits": [8, 4], "omega": [[1e-6, 1e-4]] * model.layers,
        "text": "stdlib", "text_digest": "0" * 16, "windows": 16, "length": 255, "seed": 0,
        "curve": {"perplexity": 4.2, "coefficient": 1.0, "exponent": 1.0, "largest_omega": 1e-3,
                  "plans": 16, "error": 0.1},
    }  # fmt: skip


def _use_quality(path: Path) -> None:
    from foreplan.cost_models.quality.quality_table import QualityTable
    from foreplan.datasets.models.load_model import load_model
    from foreplan.planner.report.quality_tables import quality_tables

    table = QualityTable.load(path)
    table.check(load_model("demo-llama-random"))
    table.losses((16, 8))
    quality_tables(table)
    if table.curve is not None:
        table.curve.omega(0.1)


def _use_verification(path: Path) -> None:
    from foreplan.planner.plan import load_plan
    from foreplan.planner.report.files import write_report
    from foreplan.planner.report.tables import verification_tables
    from foreplan.planner.verify.verification import load_verification

    run = load_verification(path)
    run._repr_html_()
    plan = load_plan(path.parent / "plan.json")
    verification_tables(run, plan)
    write_report(plan, path.with_suffix(".html"), verification=run)


def _workload(kind: str) -> Read:
    def read(path: Path) -> None:
        from foreplan.planner.load_workload import load_workload

        load_workload(kind, str(path))

    return read


def plan_readers() -> list[Reader]:
    """Of what plans are made of, and what becomes of them."""
    return [
        *(Reader(f"plan-{kind}", use_plan, lambda kind=kind: json.loads(plan_text(kind)),
                 lambda kind=kind: plan_text(kind).encode())
          for kind in WORKLOADS),
        Reader("plan-gpus", use_plan, lambda: json.loads(_made("serving").to_json())),
        Reader("plan-yaml", use_plan, lambda: json.loads(plan_text("serving")),
               file="plan.yaml", dump=as_yaml),
        *(Reader(f"workload-{kind}", _workload(kind), lambda kind=kind: WORKLOADS[kind],
                 file="w.yaml", dump=as_yaml) for kind in WORKLOADS),
        Reader("verification", _use_verification, lambda: json.loads(plan_and_run()[1]),
               beside=lambda: {"plan.json": plan_and_run()[0]}),
        Reader("quality", _use_quality, _quality),
    ]  # fmt: skip
