"""Shapes of `bubbles_on_gpus.py`, prices from what it measures, and decisions from them."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from bubbles_gpu_patience import slug, write

from foreplan.cost_models.costs import Copy, CostBook, CostSource, Estimate, Work
from foreplan.cost_models.roofline import RooflineSource
from foreplan.cost_models.sources.link_costs import LinkSource
from foreplan.cost_models.sources.predicted import PredictedSource
from foreplan.cost_models.sources.training_costs import TrainingSource
from foreplan.cost_models.timeline import Timeline
from foreplan.datasets import device_zoo
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.program import Program
from foreplan.datasets.specs import validate
from foreplan.planner.base import Problem
from foreplan.planner.bubbles import BubblesPlanner
from foreplan.planner.bubbles.decision import BubblesDecision
from foreplan.planner.bubbles.robustness import inside_share
from foreplan.planner.bubbles.spec import BubblesWorkload
from foreplan.planner.bubbles.training_step import TrainingStep
from foreplan.planner.predict import Forecast

#: GPUs: 4 in four stages, or two of tensor parallel pairs; 2 and 8 in two and eight, or one and
#: four of pairs.
RANKS = int(os.environ.get("BUBBLES_RANKS", "4"))
ROUNDS, WAITING = 4, 3
#: Sizes of messages whose time is measured, bytes.
MESSAGES = (1 << 20, 1 << 23, 1 << 25)
PLANNER = BubblesPlanner()


def _shape(
    microbatches: int, layers: int, width: int = 1536, *, backbone: int = 4096, tp: int = 1,
    chunks: int = 1, frozen: bool = False, microbatch: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """A backbone of 8 layers on as many positions as it is wide, encoders on 8 images of 1024."""
    return {
        "encoders": [{
            "name": "vit", "tokens": 1024, "images": 8, "projected_tokens": backbone // 4,
            "patch_features": 588, "frozen": frozen,
            "dims": {"layers": layers, "hidden": width, "heads": width // 128},
        }],
        "backbone": {
            "layers": 8, "hidden": backbone, "heads": backbone // 128,
            "ffn": backbone * 43 // 16, "gated": True, "vocab": 32000,
        },
        "sequence_length": backbone, "microbatch": microbatch, "microbatches": microbatches,
        "plan": {"pp": RANKS // tp, "tp": tp, "chunks": chunks}, "sharded_optimizer": tp == 1,
        "unit_layers": [0.5, 1.0, 2.0],
    }  # fmt: skip


SHAPES: dict[str, dict[str, Any]] = {
    "8 micro-batches": _shape(8, 12),
    "TP 2, 4 micro-batches": _shape(4, 12, tp=2),
    "large encoder": _shape(8, 24),
    "4 micro-batches": _shape(4, 12),
    "small encoder": _shape(8, 8, 1024),
    "interleaved": _shape(8, 12, chunks=2),
    "TP 2, 8 micro-batches": _shape(8, 12, tp=2),
    "12 micro-batches": _shape(12, 12),
    "frozen encoder": _shape(8, 24, frozen=True),
    "TP 2, interleaved": _shape(4, 12, tp=2, chunks=2),
    # Twice as much to compute and no more to launch: the host is not what counts.
    "TP 2, 4 of 2": _shape(4, 12, tp=2, microbatch=2),
    "TP 2, 8 of 2": _shape(8, 12, tp=2, microbatch=2),
    "TP 2, 4 of 2, interleaved": _shape(4, 12, tp=2, chunks=2, microbatch=2),
    # Halves take the device about as long as the host takes to queue them, or less.
    "narrow": _shape(4, 12, 1024, backbone=2048),
    "narrow, 8 micro-batches": _shape(8, 12, 1024, backbone=2048),
    "narrowest": _shape(4, 12, 768, backbone=1024),
}
#: Shapes whose chosen decision is compared with one process.
COMPARED = ("8 micro-batches", "TP 2, 4 of 2", "TP 2, 4 micro-batches")


def _small(shape: dict[str, Any]) -> dict[str, Any]:
    """The same layout with little to compute."""
    (vit,) = shape["encoders"]
    dims = {"layers": vit["dims"]["layers"] // 2, "hidden": 64, "heads": 2}
    vit = vit | {"dims": dims, "tokens": 32, "images": 2, "projected_tokens": 32}
    backbone = {"layers": 8, "hidden": 64, "heads": 4, "gated": True, "vocab": 128}
    return shape | {"encoders": [vit], "backbone": backbone, "sequence_length": 64}


def workload_of(name: str, processor: bool) -> BubblesWorkload:
    shape = _small(SHAPES[name]) if processor else SHAPES[name]
    return validate(BubblesWorkload, shape, f"shape {name}")


# ------------------------------------------------------------------------------------------ prices


class MeasuredPrices:
    """Prices of programs, copies and the optimizer as measured.

    Of the programs that a half layer alone runs the longest takes what the others leave of the
    measured time; those are priced by the roofline.
    """

    def __init__(self, found: dict[str, Any]) -> None:
        self._found = found
        self._programs: dict[Work, float] = {}
        self._roof = RooflineSource({"any": device_zoo.device(found["board"])})

    def estimate(self, work: Work, device: str) -> Estimate | None:
        if isinstance(work, Copy):
            return Estimate.exact(work.bytes * self._found["copy_s_per_byte"], "measured")
        if isinstance(work, Program) and work.op == "optimizer_step":
            seconds = work.dims["parameters"] * self._found["optimizer_s_per_parameter"]
            return Estimate.exact(seconds + self._found["optimizer_s"], "measured")
        if work in self._programs:
            return Estimate.exact(self._programs[work], "measured")
        return self._roof.estimate(work, "any")

    def fit(self, step: TrainingStep) -> None:
        """Take over what was measured of a step's towers."""
        tp = step.plan.tp
        towers = [("backbone", step._backbone)]
        towers += [(f"{e}", step._encoder(e, tp)) for e in range(len(step.encoders))]
        for name, works in towers:
            timed = self._found["towers"][tower_key(step, name)]
            groups = {
                **{f"{h}": lambda op, h=h, works=works: works.half(h, op) for h in (0, 1)},
                "entry": lambda op, works=works: works.ends(op, first=True, last=False),
                "exit": lambda op, works=works: works.ends(op, first=False, last=True),
            }
            used = Counter(
                work for parts_of in groups.values() for op in "FB" for work in dict(parts_of(op))
            )
            for group, parts_of in groups.items():
                for op in "FB":
                    self._share(parts_of(op), timed[group][op], used)

    def _share(self, parts: Any, seconds: float, used: Counter[Work]) -> None:
        """Price the longest program that nothing else of the tower runs with what is left."""

        def price(work: Work, count: int) -> float:
            found = self.estimate(work, "any")
            return 0.0 if found is None else found.mean_s * count

        own = [(w, n) for w, n in parts if isinstance(w, Program) and used[w] == 1]
        own = [(w, n) for w, n in own if w not in self._programs]
        if not own or seconds <= 0.0:
            return
        longest, count = max(own, key=lambda part: price(*part))
        others = sum(price(w, n) for w, n in parts if w != longest)
        self._programs[longest] = max(seconds - others, 0.02 * seconds) / count


def tower_key(step: TrainingStep, name: str) -> str:
    works = step._backbone if name == "backbone" else step._encoder(int(name), step.plan.tp)
    frozen = name != "backbone" and step.encoder(int(name)).frozen
    shape = works.shape
    return f"{shape.tower} {shape.sequences} {shape.tokens} tp {shape.tp} frozen {frozen}"


def cluster_of(found: dict[str, Any] | None, processor: bool) -> Cluster:
    devices = (
        [{"name": "cpu:threads=1", "count": RANKS, "memory_bytes": 4 << 30}] if processor
        else [{"name": f"cuda:{i}", "memory_bytes": 76 << 30} for i in range(RANKS)]
    )  # fmt: skip
    document: dict[str, Any] = {"devices": devices}
    if found is not None:
        document["tiers"] = [found["tier"]]
    return validate(Cluster, document, "cluster")


def measured_problem(name: str, found: dict[str, Any], processor: bool) -> Problem[BubblesWorkload]:
    workload, cluster = workload_of(name, processor), cluster_of(found, processor)
    prices = MeasuredPrices(found)
    assert workload.plan is not None
    unpriced = Problem(None, cluster, workload, CostBook(()))
    prices.fit(TrainingStep(unpriced, workload.plan))
    given = PLANNER.given(workload)
    costs = CostBook([prices, LinkSource(cluster)], given=given)
    return Problem(None, cluster, workload, costs)


# ------------------------------------------------------------------------------------------- plans


def unmeasured(cluster: Cluster, workload: BubblesWorkload, choice: str, board: str) -> CostBook:
    """Prices by the published figures of a GPU alone, as a profile without rows has them."""
    figures = {rank.label: device_zoo.device(board) for rank in cluster.ranks()}
    roofline = RooflineSource(figures)
    sources: list[CostSource] = [LinkSource(cluster)]
    if choice == "predicted":
        forward = PredictedSource(devices=figures)
        sources += [forward, TrainingSource(forward, roofline)]
    return CostBook([*sources, roofline], given=PLANNER.given(workload))


def plan_shape(name: str, folder: Path, processor: bool) -> None:
    """Decide one shape from predicted and roofline prices, and from what the ranks have measured.

    All is for the step that runs (`measured_problem`'s cluster), with measured links, as ``foreplan
    plan --beside predicted`` does from a profile of the host.
    """
    prices = folder / "prices.json"
    while not prices.exists():
        time.sleep(0.1)
    started, workload = time.monotonic(), workload_of(name, processor)
    found = json.loads(prices.read_text())
    cluster = cluster_of(found, processor)
    made: dict[str, BubblesDecision] = {}
    ahead: dict[str, float] = {}
    for choice in ("predicted", "roofline"):
        problem = Problem(
            None, cluster, workload, unmeasured(cluster, workload, choice, found["board"])
        )
        made[choice] = PLANNER.decide(problem).decision
        ahead[choice] = Forecast(PLANNER, problem, made[choice]).total_s
    ready = time.monotonic() - started
    started = time.monotonic()
    problem = measured_problem(name, found, processor)
    choice_of = PLANNER.decide(problem)
    plans: dict[str, BubblesDecision | str] = {"measured": choice_of.decision, **made}
    plans |= PLANNER.baselines(problem)
    document: dict[str, Any] = {"ahead_s": ready, "decide_s": time.monotonic() - started}
    document["own_prediction_s"] = ahead
    document["notes"] = list(choice_of.assumptions)
    document["decisions"] = {}
    for label, decision in plans.items():
        if isinstance(decision, str):
            document["decisions"][label] = {"impossible": decision}
            continue
        forecast = Forecast(PLANNER, problem, decision)
        document["decisions"][label] = {
            "decision": decision.model_dump(mode="json"),
            "predicted_s": forecast.total_s,
            "metrics": dict(forecast.metrics),
            "bubbles": bubbles_of(forecast.timeline),
            "actions": actions_of(forecast.timeline),
        }
    write(folder / f"plans.{slug(name)}.json", document)


def bubbles_of(timeline: Timeline) -> dict[str, float]:
    """Idle time of the backbone while it runs, and how much of it encoders compute in."""
    schedule = timeline.schedule
    ops = np.asarray(schedule.ops)[schedule.op]
    own = np.isin(ops, ("F", "B", "I", "W"))
    encoding = np.isin(ops, ("encode", "encode_backward"))
    begin, end = timeline.start_s[own].min(), timeline.end_s[own].max()
    length = timeline.end_s - timeline.start_s
    idle = (end - begin) * schedule.ranks - float(length[own].sum())
    inside = np.clip(
        np.minimum(timeline.end_s, end) - np.maximum(timeline.start_s, begin), 0.0, None
    )  # fmt: skip
    filled = float(inside[encoding].sum())
    return {
        "window_s": float(end - begin), "idle_s": idle, "filled_s": filled,
        "filled_share": filled / idle if idle > 0 else 0.0,
        "encoders_s": float(length[encoding].sum()), "inside_share": inside_share(timeline),
    }  # fmt: skip


def actions_of(timeline: Timeline) -> dict[str, list[float]]:
    """Number and summed seconds of each rank's actions by operation: ``rank op``."""
    schedule, found = timeline.schedule, {}
    ops = np.asarray(schedule.ops)[schedule.op]
    length = timeline.end_s - timeline.start_s
    for rank in range(schedule.ranks):
        for op in np.unique(ops):
            mine = (ops == op) & (schedule.rank == rank)
            if mine.any():
                found[f"{rank} {op}"] = [int(mine.sum()), float(length[mine].sum())]
    return found
