"""What the drift gate freezes: predictions of the shipped predictors, and plans of every planner.

Small, quick, and from public figures and committed profiles alone, so that every machine computes
the same. Each case gives plain values by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from foreplan.planner.compare import leaves

ROOT = Path(__file__).parents[2]
PROFILES = ROOT / "tests" / "benchmarks" / "profiles" / "cluster.yaml"
MEASURED = ROOT / "datasets" / "measured"

DEVICES = ("t4", "v100-32g", "a100-80g", "l4", "h100-sxm", "h200")
PROGRAMS: tuple[tuple[str, str, dict[str, int]], ...] = (
    ("linear", "bf16/bf16/torch.linear", {"rows": 1, "n": 4096, "k": 4096}),
    ("linear", "bf16/bf16/torch.linear", {"rows": 2048, "n": 11008, "k": 4096}),
    ("linear", "fp32/fp32/torch.linear", {"rows": 512, "n": 1024, "k": 1024}),
    ("linear", "int8/bf16/torch.dequant_linear", {"rows": 8, "n": 4096, "k": 4096}),
    ("linear", "int4/bf16/torch.dequant_linear", {"rows": 8, "n": 4096, "k": 4096}),
    ("attention", "bf16/bf16/torch.sdpa",
     {"batch": 8, "queries": 1, "keys": 1024, "heads": 32, "kv_heads": 8, "head_dim": 128}),
    ("attention", "bf16/bf16/torch.sdpa",
     {"batch": 2, "queries": 512, "keys": 512, "heads": 32, "kv_heads": 32, "head_dim": 128}),
    ("norm", "bf16/bf16/torch.rms_norm", {"rows": 4096, "cols": 4096}),
    ("add", "bf16/bf16/torch.add", {"rows": 4096, "cols": 4096}),
)  # fmt: skip

BUBBLES = {
    "backbone": {"layers": 8, "hidden": 2048, "heads": 16, "vocab": 32000},
    "encoders": [{"name": "vit", "dims": {"layers": 8, "hidden": 1024, "heads": 16},
                  "tokens": 576, "patch_features": 588}],
    "sequence_length": 1024, "microbatch": 1, "microbatches": 8, "plan": {"pp": 4},
}  # fmt: skip
PRECISION = {
    "network": "byte_lm", "batch": 8, "calibration_batches": 1,
    "network_options": {"width": 64, "layers": 2, "heads": 2, "context": 32},
}  # fmt: skip
SERVING = {
    "batch": 8, "prompt_tokens": 128, "new_tokens": 32, "min_average_bits": 8,
    "prefill_microbatch": 2, "decode_microbatch": 4,
}  # fmt: skip
#: Name: kind, model, cluster, workload, costs.
PLANS: Mapping[str, tuple[str, str | None, str | Path, dict[str, Any], Any]] = {
    "serving, committed profiles": (
        "serving", "demo-llama-random", PROFILES,
        {"batch": 8, "prompt_tokens": 64, "new_tokens": 24, "min_average_bits": 8}, "measured",
    ),
    "serving, shipped predictor": ("serving", "llama-2-13b", "a10,2xt4", SERVING, "predicted"),
    "serving, roofline": ("serving", "llama-2-13b", "a10,2xt4", SERVING, "roofline"),
    "precision, roofline": ("precision", None, "t4,v100-32g", PRECISION, "roofline"),
    "bubbles, roofline": ("bubbles", None, "4xa100-80g", BUBBLES, "roofline"),
    "bubbles, shipped predictor": ("bubbles", None, "4xa100-80g", BUBBLES, "predicted"),
}  # fmt: skip


def operators() -> dict[str, Any]:
    """Seconds and 90 % interval of library operators by ``pretrained:ops``."""
    from foreplan.cost_models.predictor import Predictor
    from foreplan.datasets.program import Variant, program

    predictor = Predictor.load()
    wanted = [program(op, Variant.parse(v), **dims) for op, v, dims in PROGRAMS]
    found: dict[str, Any] = {}
    for device in DEVICES:
        for (op, variant, dims), e in zip(
            PROGRAMS, predictor.supported(wanted, device), strict=True
        ):
            shape = " ".join(f"{k}={v}" for k, v in dims.items())
            values = None if e is None else [e.mean_s, e.low_s, e.high_s]
            found |= leaves({f"{op}@{variant} {shape} on {device}": dict(_named(values))})
    return found


def _named(values: list[float] | None) -> Iterator[tuple[str, Any]]:
    yield from zip(("mean_s", "low_s", "high_s"), values or (None,) * 3, strict=True)


def programs() -> dict[str, Any]:
    """Seconds of scheduled programs by ``pretrained:programs``, 12 of each of two shards."""
    import numpy as np

    from foreplan.cost_models.programs.program_commands import load_program_model
    from foreplan.cost_models.programs.program_data import read_programs

    model = load_program_model("pretrained:programs")
    found: dict[str, Any] = {}
    for name in ("h200_programs/programs-002.parquet", "epyc_programs/programs-001.parquet"):
        table = read_programs([MEASURED / name]).table.take(np.arange(12))
        for k, seconds in enumerate(model.predict(table)):
            found[f"{name} row {k}: mean_s"] = float(seconds)
    return found


def networks() -> dict[str, Any]:
    """End-to-end latency of networks on zoo devices by ``pretrained:ops``."""
    from foreplan.cost_models.predict_command import predict_model

    found: dict[str, Any] = {}
    for suffix, options in (
        ("", {}), (", training", {"phase": "training"}),
        (", training as a graph", {"phase": "training", "execution": "graph"}),
        (", compiled", {"execution": "compiled"}),
        (", training, compiled", {"phase": "training", "execution": "compiled"}),
    ):  # fmt: skip
        result = predict_model("gpt2", ["t4,a100-80g,h200"], batch=2, sequence_length=64, **options)
        for row in result["devices"]:
            found[f"gpt2 on {row['device']}{suffix}: latency_s"] = row["latency_s"]
    return {**found, **_images()}


def _images() -> dict[str, Any]:
    """A step with convolutions, their bias and batch norms, by kind of operator."""
    import torch
    from torch import nn

    from foreplan.cost_models.replay import predict_latency

    with torch.device("meta"):
        network = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1, groups=4), nn.ReLU(), nn.AvgPool2d(2),
            nn.Flatten(), nn.Linear(64 * 8 * 8, 10),
        )  # fmt: skip
        step = predict_latency(
            network, "h200", inputs=[torch.empty(16, 3, 32, 32)], phase="training",
            execution="graph",
        )  # fmt: skip
    return {f"images on h200, {kind}: busy_s": s for kind, s in step.by("kind").items()}


def planned(name: str) -> dict[str, Any]:
    """A plan's decision, prediction, memory, bound and confidence."""
    from foreplan.planner.api import plan

    kind, model, cluster, workload, costs = PLANS[name]
    made = plan(kind, model, cluster, workload, costs=costs)
    sure = made.confidence
    kept = {
        "decision": made.decision,
        "total_s": made.predicted.total_s,
        "metrics": dict(made.predicted.metrics),
        "memory": {rank.device: rank.memory_bytes for rank in made.predicted.ranks},
        "bound": {"status": made.bound.status, "lower_s": made.bound.lower_s},
        "alternatives": {other.name: other.predicted.total_s for other in made.alternatives},
        "rejected": sorted(out.name for out in made.rejected),
        "probability_best": sure.probability_best,
        "measure_next": [f"{m.program} on {m.device}" for m in sure.measure_next],
    }
    return leaves(kept)


def _plan_case(name: str) -> Callable[[], dict[str, Any]]:
    return lambda: planned(name)


CASES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "pretrained:ops": operators,
    "pretrained:programs": programs,
    "networks": networks,
    **{f"plan: {name}": _plan_case(name) for name in PLANS},
}


def weights() -> dict[str, str]:
    """Checksum of the weights of each shipped predictor."""
    import hashlib

    from foreplan.cost_models.model_store import PRETRAINED, WEIGHTS

    return {
        f"pretrained:{folder.name}": hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
        for folder in sorted(PRETRAINED.iterdir())
        if (folder / WEIGHTS).is_file()
    }
