"""Small multimodal steps with hand-made orders; also imported by the processes of a run."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from foreplan.cost_models.costs import CostBook
from foreplan.cost_models.pipeline import pipeline_order
from foreplan.cost_models.schedule import Schedule
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.specs import validate
from foreplan.planner.base import Problem
from foreplan.planner.bubbles.actions import Step, write_order
from foreplan.planner.bubbles.decision import BubblesDecision
from foreplan.planner.bubbles.execution.entry import rank_kernels
from foreplan.planner.bubbles.execution.kernels import BubbleKernels
from foreplan.planner.bubbles.schedule import StepSchedule
from foreplan.planner.bubbles.spec import BubblesWorkload
from foreplan.planner.bubbles.training_step import TrainingStep
from foreplan.planner.bubbles.widen import widen

BACKBONE = {"layers": 4, "hidden": 16, "heads": 2, "ffn": 24, "gated": True, "vocab": 19}
VIT = {"layers": 2, "hidden": 12, "heads": 2, "ffn": 20}
AUDIO = {"layers": 1, "hidden": 8, "heads": 2, "ffn": 12}


def encoder(name: str = "vit", **fields: Any) -> dict[str, Any]:
    dims = {"vit": VIT, "audio": AUDIO}[name]
    return {"name": name, "dims": dims, "tokens": 4, "patch_features": 6} | fields


def problem(
    ranks: int,
    encoders: list[dict[str, Any]],
    *,
    microbatches: int = 4,
    gpu: bool = False,
    **fields: Any,
) -> Problem[BubblesWorkload]:
    document = {
        "encoders": encoders, "backbone": BACKBONE, "sequence_length": 10, "microbatch": 2,
        "microbatches": microbatches,
    } | fields  # fmt: skip
    devices: list[dict[str, Any]] = [
        {"name": "cpu:threads=1", "count": ranks, "memory_bytes": 1 << 30}
    ]
    if gpu:
        devices = [{"name": f"cuda:{i}", "memory_bytes": 64 << 30} for i in range(ranks)]
    cluster = validate(Cluster, {"devices": devices}, "cluster")
    workload = validate(BubblesWorkload, document, "workload")
    return Problem(None, cluster, workload, CostBook(()), seed=3)


def decision(
    problem: Problem[BubblesWorkload],
    schedule: str,
    *,
    ranks: int,
    chunks: int = 1,
    encoder_ranks: list[list[list[int]]],
    halves: int = 1,
    fill: str = "fine",
    shuffle: int | None = None,
    tp: int = 1,
    pieces: int | None = None,
    turn: int = 0,
) -> BubblesDecision:
    """A decision with `pipeline_order`'s backbone and encoder work put in by hand.

    Args:
        problem: what is trained.
        schedule: name of the backbone's schedule.
        ranks: of the pipeline.
        chunks: virtual stages of a rank.
        encoder_ranks: for each encoder the ranks of each pipeline's stages.
        halves: half layers of a unit.
        fill: ``fine`` puts a unit wherever a rank would wait, ``three-phase`` all forwards before
            and all backwards behind the backbone.
        tp: lanes of each rank.
        shuffle: seed of a random choice among all that a rank could do next, instead.
        pieces: seed of a choice of passes that are written piece by piece; units of encoders then
            have their collectives apart.
        turn: pipelines of an encoder that micro-batches move on by.
    """
    workload = problem.workload
    count = workload.microbatches or 1
    plans = []
    for spec, rows in zip(workload.encoders, encoder_ranks, strict=True):
        assert spec.dims is not None
        layers, stages = spec.dims.layers, len(rows[0])
        cuts = [k * layers // stages for k in range(stages + 1)]
        units = sorted({*range(0, 2 * layers, halves), *(2 * cut for cut in cuts)})
        plans.append({
            "name": spec.name, "stages": list(itertools.pairwise(cuts)), "units": units,
            "ranks": rows, "tp": tp, "slots": [(i + turn) % len(rows) for i in range(count)],
        })  # fmt: skip
    virtual = ranks * chunks
    backbone = workload.backbone
    assert backbone is not None
    ends = [k * backbone.layers // virtual for k in range(virtual + 1)]
    document = {
        "plan": {"pp": ranks, "chunks": chunks, "tp": tp}, "schedule": schedule,
        "microbatches": count,
        "warmup": [0] * ranks, "fill": fill, "encoders": plans, "orders": ["0F0"] * ranks,
        "stages": [
            {"rank": s % ranks, "start": ends[s], "end": ends[s + 1]} for s in range(virtual)
        ],
    }  # fmt: skip
    bare = validate(BubblesDecision, document, "decision")
    orders = _Orders(bare, problem.workload, schedule, chunks, fill, shuffle).make()
    if pieces is not None:
        draw = random.Random(pieces)
        orders = [list(_in_pieces(bare, order, draw)) for order in orders]
    return bare.model_copy(update={"orders": tuple(write_order(order) for order in orders)})


def _in_pieces(plan: BubblesDecision, order: list[Step], draw: random.Random) -> Iterator[Step]:
    """Split some passes, with a unit between pieces where one follows, and the units' sums."""
    rest = list(order)
    while rest:
        step = rest.pop(0)
        if step.encoder >= 0:
            yield from _with_sums(plan, step)
        elif draw.random() < 0.3:
            yield step
        else:
            stage = plan.stages[step.stage]
            for piece in range(2 * (stage.end - stage.start) + 1):
                yield step._replace(piece=piece)
                # A forward unit needs nothing of the backbone.
                if rest and rest[0].encoder >= 0 and rest[0].op == "F" and draw.random() < 0.7:
                    yield from _with_sums(plan, rest.pop(0))


def _with_sums(plan: BubblesDecision, unit: Step) -> Iterator[Step]:
    encoder = plan.encoders[unit.encoder]
    span = encoder.stage_units(encoder.stage_of(unit.unit))
    yield unit._replace(op=unit.op.lower())
    yield unit
    if unit.unit == (span[-1] if unit.op == "F" else span[0]):
        yield unit._replace(op=unit.op.lower(), unit=unit.unit + (1 if unit.op == "F" else -1))


class _Orders:
    """Lists what each rank does by walking through time, every action one tick long."""

    def __init__(
        self, plan: BubblesDecision, workload: BubblesWorkload, schedule: str, chunks: int,
        fill: str, shuffle: int | None,
    ) -> None:  # fmt: skip
        ranks = len(plan.orders)
        self.plan, self.workload, self.fill = plan, workload, fill
        self.choose: Callable[[list[Step]], Step] = lambda ready: ready[0]
        if shuffle is not None:
            self.choose = random.Random(shuffle).choice
        listed = pipeline_order(
            schedule, stages=ranks, microbatches=plan.microbatches, chunks=chunks
        )
        letter = {"F": "F", "BW": "B", "B": "I", "W": "W"}
        self.turn = "I" if schedule.startswith("zb") else "B"
        self.backbone = [[Step(letter[op], i, s) for op, s, i in order] for order in listed]
        self.units: list[list[Step]] = [[] for _ in range(ranks)]
        for e, encoder_plan in enumerate(plan.encoders):
            for op in "F" if workload.encoders[e].frozen else "FB":
                for i in range(plan.microbatches):
                    row = encoder_plan.ranks[encoder_plan.slots[i]]
                    for u in range(len(encoder_plan.units) - 1)[:: 1 if op == "F" else -1]:
                        rank = row[encoder_plan.stage_of(u)]
                        self.units[rank].append(Step(op, i, encoder=e, unit=u))
        self.done: set[Step] = set()

    def make(self) -> list[list[Step]]:
        orders: list[list[Step]] = [[] for _ in self.backbone]
        while any(self.backbone) or any(self.units):
            tick: list[tuple[int, Step]] = []
            for rank in range(len(orders)):
                ready = self.ready(rank)
                if ready:
                    tick.append((rank, self.choose(ready)))
            assert tick, "nothing can go on"
            for rank, step in tick:
                orders[rank].append(step)
                self.done.add(step)
                (self.units if step.encoder >= 0 else self.backbone)[rank].remove(step)
        return orders

    def ready(self, rank: int) -> list[Step]:
        backbone = [s for s in self.backbone[rank][:1] if self.may(s)]
        units = [s for s in self.units[rank] if self.may(s)]
        if self.fill == "three-phase":
            if any(s.op == "F" for rows in self.units for s in rows):
                backbone = []
            if any(self.backbone):
                units = [s for s in units if s.op == "F"]
        return backbone + units

    def may(self, step: Step) -> bool:
        return all(needed in self.done for needed in self.needs(step))

    def needs(self, step: Step) -> list[Step]:
        i, plans = step.microbatch, self.plan.encoders
        if step.encoder >= 0:
            e, u = step.encoder, step.unit
            last = len(plans[e].units) - 2
            if step.op == "F":
                return [Step("F", i, encoder=e, unit=u - 1)] if u else []
            return [Step("B", i, encoder=e, unit=u + 1) if u < last else Step(self.turn, i, 0)]
        last = len(self.plan.stages) - 1
        if step.op == "F" and step.stage == 0:
            return [Step("F", i, encoder=e, unit=len(p.units) - 2) for e, p in enumerate(plans)]
        if step.op == "F":
            return [Step("F", i, step.stage - 1)]
        if step.op == "W":
            return [Step("I", i, step.stage)]
        if step.stage < last:
            return [Step(self.turn, i, step.stage + 1)]
        return [Step("F", i, step.stage)]


def of_document(case: dict[str, Any]) -> tuple[Problem[BubblesWorkload], BubblesDecision]:
    arguments, fields = case["problem"]
    return problem(*arguments, **fields), validate(BubblesDecision, case["decision"], "decision")


def schedule_of(problem: Problem[BubblesWorkload], decision: BubblesDecision) -> Schedule:
    """One rank for every process."""
    made = StepSchedule(TrainingStep(problem, decision.plan), decision).build()
    lanes = decision.plan.tp
    labels = [rank.label for rank in problem.cluster.ranks()]
    return made if lanes == 1 else widen(made, labels, lanes)


def kernels_of(
    problem: Problem[BubblesWorkload], decision: BubblesDecision, mode: str = "reference"
) -> list[BubbleKernels]:
    return [
        rank_kernels(problem, decision, rank, mode=mode) for rank in range(len(decision.orders))
    ]


def run_ranks(jobs: dict[str, Any], folder: Path) -> list[list[dict[str, Any]]]:
    """What each rank reports of each case; ranks are processes, see ``rank_process.py``."""
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    script = Path(__file__).parent / "rank_process.py"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(path)], env=environment, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"result.{r}.json").read_text()) for r in range(jobs["ranks"])]
