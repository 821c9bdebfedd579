"""Bubble plans on the GPUs of one host: decided from three kinds of prices, all run, all compared.

``python tests/benchmarks/bubbles_on_gpus.py FOLDER`` on four GPUs, or with ``--processor`` on four
processes of this machine and small sizes, which tests the way and says nothing about times. Per
shape it

- measures halves of layers, the towers' ends, the optimizer and the links, each as in a step, with
  receives waiting beside them, because those hold multiprocessors;
- decides from these prices, from the shipped predictor's and from the roofline of the published
  figures of the chip, and takes the baselines of the first;
- runs every decision for a few steps, and compares losses and gradients with one process's.

``FOLDER/results.json`` has everything, written after every decision.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from foreplan.cost_models.book import Profiles, cost_book
from foreplan.cost_models.costs import Copy, CostBook, Estimate, Work
from foreplan.cost_models.link_costs import LinkSource
from foreplan.cost_models.roofline import RooflineSource
from foreplan.cost_models.timeline import Timeline
from foreplan.datasets import device_zoo
from foreplan.datasets.cluster import Cluster, parse_devices
from foreplan.datasets.program import Program
from foreplan.datasets.specs import validate
from foreplan.planner.base import Problem
from foreplan.planner.bubbles import BubblesPlanner
from foreplan.planner.bubbles.decision import BubblesDecision
from foreplan.planner.bubbles.robustness import inside_share
from foreplan.planner.bubbles.spec import BubblesWorkload
from foreplan.planner.bubbles.training_step import TrainingStep
from foreplan.planner.predict import Forecast

RANKS, ROUNDS, WAITING = 4, 4, 3
#: Sizes of messages whose time is measured, bytes.
MESSAGES = (1 << 20, 1 << 23, 1 << 25)
PLANNER = BubblesPlanner()


def _shape(
    microbatches: int, layers: int, width: int = 1536, *, pp: int = 4, tp: int = 1,
    chunks: int = 1, frozen: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """A backbone of 8 layers of width 4096 on 4096 positions, encoders on 8 images of 1024."""
    return {
        "encoders": [{
            "name": "vit", "tokens": 1024, "images": 8, "projected_tokens": 1024,
            "patch_features": 588, "frozen": frozen,
            "dims": {"layers": layers, "hidden": width, "heads": width // 128},
        }],
        "backbone": {
            "layers": 8, "hidden": 4096, "heads": 32, "ffn": 11008, "gated": True, "vocab": 32000
        },
        "sequence_length": 4096, "microbatch": 1, "microbatches": microbatches,
        "plan": {"pp": pp, "tp": tp, "chunks": chunks}, "sharded_optimizer": tp == 1,
        "unit_layers": [0.5, 1.0, 2.0],
    }  # fmt: skip


SHAPES: dict[str, dict[str, Any]] = {
    "8 micro-batches": _shape(8, 12),
    "TP 2, 4 micro-batches": _shape(4, 12, pp=2, tp=2),
    "large encoder": _shape(8, 24),
    "4 micro-batches": _shape(4, 12),
    "small encoder": _shape(8, 8, 1024),
    "interleaved": _shape(8, 12, chunks=2),
    "TP 2, 8 micro-batches": _shape(8, 12, pp=2, tp=2),
    "12 micro-batches": _shape(12, 12),
    "frozen encoder": _shape(8, 24, frozen=True),
    "TP 2, interleaved": _shape(4, 12, pp=2, tp=2, chunks=2),
}
#: Shapes whose chosen decision is compared with one process.
COMPARED = ("8 micro-batches", "TP 2, 4 micro-batches")


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

    Of a half layer's programs the longest takes what the others leave of the measured time; those
    are priced by the roofline.
    """

    def __init__(self, found: dict[str, Any]) -> None:
        self._found = found
        self._programs: dict[Work, float] = {}
        self._roof = RooflineSource({"any": device_zoo.device("h200")})

    def estimate(self, work: Work, device: str) -> Estimate | None:
        if isinstance(work, Copy):
            return Estimate.exact(work.bytes * self._found["copy_s_per_byte"], "measured")
        if isinstance(work, Program) and work.op == "optimizer_step":
            count = work.dims["parameters"]
            return Estimate.exact(count * self._found["optimizer_s_per_parameter"], "measured")
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
            groups = [(f"{h}", lambda op, h=h, works=works: works.half(h, op)) for h in (0, 1)]
            groups += [
                ("entry", lambda op, works=works: works.ends(op, first=True, last=False)),
                ("exit", lambda op, works=works: works.ends(op, first=False, last=True)),
            ]
            for group, parts_of in groups:
                for op in "FB":
                    self._share(parts_of(op), timed[group][op])

    def _share(self, parts: Any, seconds: float) -> None:
        def price(work: Work, count: int) -> float:
            found = self.estimate(work, "any")
            return 0.0 if found is None else found.mean_s * count

        programs = [(w, n) for w, n in parts if isinstance(w, Program) and w not in self._programs]
        if not programs or seconds <= 0.0:
            return
        longest, count = max(programs, key=lambda part: price(*part))
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
        else [{"name": f"cuda:{i}", "memory_bytes": 138 << 30} for i in range(RANKS)]
    )  # fmt: skip
    document: dict[str, Any] = {"devices": devices}
    if found is not None:
        document["tiers"] = [found["tier"]]
    return validate(Cluster, document, "cluster")


def measured_problem(name: str, found: dict[str, Any], processor: bool) -> Problem[BubblesWorkload]:
    workload, cluster = workload_of(name, processor), cluster_of(found, processor)
    prices = MeasuredPrices(found)
    costs = CostBook([prices, LinkSource(cluster)], given=PLANNER.given(workload))
    problem = Problem(None, cluster, workload, costs)
    assert workload.plan is not None
    prices.fit(TrainingStep(problem, workload.plan))
    return problem


# ------------------------------------------------------------------------------------------- plans


def plan_shape(name: str, folder: Path, processor: bool) -> None:
    """Decide one shape: ahead of any measurement, and again from what the ranks have measured."""
    started, workload = time.monotonic(), workload_of(name, processor)
    cluster = parse_devices(f"{RANKS}xh200")
    made: dict[str, BubblesDecision] = {}
    ahead: dict[str, float] = {}
    for choice in ("predicted", "roofline"):
        costs = cost_book(cluster, Profiles(), choice, given=PLANNER.given(workload))  # type: ignore[arg-type]
        problem = Problem(None, cluster, workload, costs)
        made[choice] = PLANNER.decide(problem).decision
        ahead[choice] = Forecast(PLANNER, problem, made[choice]).total_s
    ready = time.monotonic() - started
    prices = folder / "prices.json"
    while not prices.exists():
        time.sleep(0.1)
    started = time.monotonic()
    problem = measured_problem(name, json.loads(prices.read_text()), processor)
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


def write(path: Path, document: Any) -> None:
    """Write a file that is whole as soon as it is there."""
    path.with_suffix(".part").write_text(json.dumps(document))
    path.with_suffix(".part").rename(path)


def slug(name: str) -> str:
    return name.replace(" ", "_").replace(",", "")


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


# ------------------------------------------------------------------------------------------- ranks


class Ranks:
    """One of the processes that measure and run; all call the same methods at the same time."""

    def __init__(self, rank: int, folder: Path, processor: bool) -> None:
        import torch
        import torch.distributed as dist

        self.rank, self.folder, self.processor = rank, folder, processor
        self.backend = "gloo" if processor else "nccl"
        self.device = torch.device("cpu") if processor else torch.device("cuda", rank)
        if processor:
            torch.set_num_threads(1)
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        else:
            torch.cuda.set_device(rank)
        self.dtype = torch.float32 if processor else torch.bfloat16
        store = dist.FileStore(os.environ["BUBBLES_STORE"], RANKS)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=150)
        )
        self._keep_groups()
        self.peers = self._open_peers()
        self.say(f"messages by {'copy engines' if self.peers else self.backend}")

    def _open_peers(self) -> Any:
        """Memory of the neighbour, or ``None`` where NCCL or gloo has to carry messages."""
        import torch
        import torch.distributed as dist

        from foreplan.planner.verify.peer_memory import Offer, PeerMemory

        if self.processor or "NO_PEERS" in os.environ:
            return None
        partner = self.rank ^ 1
        self._landing = {
            10 * self.rank + k: torch.zeros(size, dtype=torch.uint8, device=self.device)
            for k, size in enumerate(MESSAGES)
        }
        told: list[Any] = [None] * RANKS
        works = True
        try:
            peers = PeerMemory(self._landing, self.device)
            dist.all_gather_object(told, peers.offers())
            offers = {tag: Offer(*o) for part in told for tag, o in part.items()}
            peers.open([10 * partner + k for k in range(len(MESSAGES))], offers)
            self.sync()
            dist.barrier()
            sent = torch.full((MESSAGES[0],), self.rank + 1, dtype=torch.uint8, device=self.device)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            peers.send(10 * partner, sent, stream)
            peers.receive(10 * self.rank, stream)
            done = torch.cuda.Event()
            done.record(stream)
            started = time.monotonic()
            while not done.query() and time.monotonic() < started + 5.0:
                time.sleep(0.01)
            works = done.query() and bool((self._landing[10 * self.rank] == partner + 1).all())
        except (OSError, RuntimeError) as error:
            print(f"rank {self.rank}: no peer memory: {error}", flush=True)
            works = False
        dist.all_gather_object(told, works)
        return peers if all(told) else None

    def _keep_groups(self) -> None:
        """Connections of equal members are opened once: a run of many decisions needs few."""
        import torch.distributed as dist

        made: dict[Any, Any] = {}
        self._new_group = new_group = dist.new_group

        def kept(ranks: Any = None, **options: Any) -> Any:
            asked = options.get("pg_options")
            ctas = 0 if asked is None else asked.config.max_ctas
            key = tuple(ranks or ()), options.get("backend"), ctas
            if key not in made:
                made[key] = new_group(ranks, **options)
            return made[key]

        dist.new_group = kept

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"{time.strftime('%T')} {text}", flush=True)

    def sync(self) -> None:
        import torch

        if not self.processor:
            torch.cuda.synchronize()

    def drain(self) -> None:
        """Wait for the compute stream alone: a receive may be waiting on another."""
        import torch

        if not self.processor:
            torch.cuda.current_stream().synchronize()

    def timed(self, work: Callable[[], Any], times: int = 5) -> float:
        """Median seconds of a call, queued work included."""
        import torch

        found = []
        for turn in range(times + 1):
            if self.processor:
                started = time.perf_counter()
                work()
                found.append(time.perf_counter() - started)
            else:
                a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                a.record()
                work()
                b.record()
                b.synchronize()
                found.append(a.elapsed_time(b) * 1e-3)
            if turn == 0:
                found.clear()
        return float(np.median(found))

    # ---------------------------------------------------------------------------------- measuring

    def measure(self, names: list[str]) -> None:
        import torch.distributed as dist

        tasks: dict[str, tuple[str, str]] = {}
        for name in names:
            for key, tower in self._towers(name):
                tasks.setdefault(key, (name, tower))
        mine = list(tasks.items())[self.rank :: RANKS]
        self._alone = {key: self._tower_runs(*task) for key, task in mine}
        times = {key: self._time_tower(runs) for key, runs in self._alone.items()}
        parts: list[Any] = [None] * RANKS
        dist.all_gather_object(parts, times)
        self.say(f"{len(tasks)} towers measured")
        found = {
            "towers": {k: v for part in parts for k, v in part.items()},
            **self._memory_rates(),
            "tier": self._tier(),
        }
        if self.rank == 0:
            write(self.folder / "prices.json", found)
        self._alone.clear()
        self.free()

    def beside_receives(self, name: str) -> dict[str, Any]:
        """Halves of a backbone's layers alone and while receives of NCCL's wait; all ranks alike.

        Receives that are posted early hold multiprocessors until their message comes.
        """
        import torch.distributed as dist

        self._open_waiting()
        runs = self._tower_runs(name, "backbone")
        free = self._time_tower(runs)
        dist.barrier()
        self._wait_for_partner(post=True)
        beside = self._time_tower(runs)
        dist.barrier()
        self._wait_for_partner(post=False)
        parts: list[Any] = [None] * RANKS
        dist.all_gather_object(parts, (free, beside))
        return {"waiting": WAITING, "alone": parts[0][0], "beside": [part[1] for part in parts]}

    def free(self) -> None:
        """Give memory back to the GPU."""
        import torch

        gc.collect()
        if not self.processor:
            torch.cuda.empty_cache()

    def _towers(self, name: str) -> Iterator[tuple[str, str]]:
        workload, cluster = workload_of(name, self.processor), cluster_of(None, self.processor)
        assert workload.plan is not None
        step = TrainingStep(Problem(None, cluster, workload, CostBook(())), workload.plan)
        for tower in ("backbone", *(str(e) for e in range(len(step.encoders)))):
            yield tower_key(step, tower), tower

    def _tower_runs(self, name: str, tower: str) -> Any:
        """Cuts of one tower with an input each: four halves, entry and exit."""
        import torch

        from foreplan.planner.bubbles.execution.batches import Batches
        from foreplan.planner.bubbles.execution.cut import Cut
        from foreplan.planner.bubbles.execution.flat_parameters import FlatParameters
        from foreplan.planner.bubbles.execution.parts import BackbonePart, EncoderPart
        from foreplan.planner.bubbles.execution.step_sizes import StepSizes
        from foreplan.planner.bubbles.towers import backbone_tower, encoder_towers

        workload, cluster = workload_of(name, self.processor), cluster_of(None, self.processor)
        assert workload.plan is not None
        problem = Problem(None, cluster, workload, CostBook(()))
        assert workload.microbatches is not None
        sizes = StepSizes(
            workload, backbone_tower(problem), encoder_towers(problem), workload.microbatches
        )
        lanes, batches = _alone(workload.plan.tp), Batches(sizes, self.device, self.dtype)
        cuts, inputs, frozen = {}, {}, False
        if tower == "backbone":
            layers, width = sizes.backbone.layers, sizes.backbone.hidden
            inner = BackbonePart(sizes, 1, 3, None, lanes)
            first = BackbonePart(sizes, 0, 1, None, lanes)
            last = BackbonePart(sizes, layers - 1, layers, None, lanes)
            rows = workload.microbatch, workload.sequence_length, width
            features = [
                torch.randn(workload.microbatch, spec.features, width) for spec in workload.encoders
            ]
            cuts["entry"] = Cut(
                lambda xs, i: first.open(xs, batches.tokens(i)), [True] * len(features)
            )
            inputs["entry"] = [x.to(self.device, self.dtype) for x in features]
            cuts["exit"] = Cut(
                lambda xs, i: last.loss(last.close(xs[0]), batches.labels(i)), [True]
            )
            parts: list[Any] = [inner, first, last]
        else:
            e = int(tower)
            spec, frozen = workload.encoders[e], workload.encoders[e].frozen
            halves = 2 * sizes.encoders[e].layers
            inner = EncoderPart(sizes, e, 2, 6, lanes)  # type: ignore[assignment]
            head = EncoderPart(sizes, e, 0, 1, lanes)
            tail = EncoderPart(sizes, e, halves - 1, halves, lanes)
            rows = sizes.sequences(e), spec.tokens, sizes.encoders[e].hidden
            cuts["entry"] = Cut(lambda xs, _: head.open(xs[0]), [False], frozen=frozen)
            inputs["entry"] = [batches.patches(e, 0)]
            cuts["exit"] = Cut(lambda xs, _: tail.close(xs[0]), [True], frozen=frozen)
            parts = [inner, head, tail]
        for number, half in enumerate(inner.pieces):
            cuts[f"half {number}"] = Cut(
                lambda xs, _, half=half: half(xs[0]),
                [True],
                frozen=frozen,  # type: ignore[misc]
            )
        flat = FlatParameters(parts, 0, self.device, self.dtype, frozen=frozen, lanes=lanes)
        x = torch.randn(rows).to(self.device, self.dtype)
        inputs |= {key: [x] for key in ("exit", *(k for k in cuts if k.startswith("half")))}
        return cuts, inputs, frozen, flat

    def _time_tower(self, runs: Any) -> dict[str, dict[str, float]]:
        """Forward and backward seconds by half (0 attention, 1 MLP), ``entry`` and ``exit``."""
        import torch

        cuts, inputs, frozen, _ = runs
        order = ["entry", *(f"half {k}" for k in range(4)), "exit"]
        seconds: dict[tuple[str, str], list[float]] = {}
        for turn in range(-2, 4):
            stamps: list[tuple[str, str, Any, Any]] = []

            def run(key: str, op: str, work: Callable[[], Any], stamps: Any = stamps) -> Any:
                if self.processor:
                    a = time.perf_counter()
                    made = work()
                    stamps.append((key, op, a, time.perf_counter()))
                else:
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    made = work()
                    end.record()
                    stamps.append((key, op, begin, end))
                return made

            gradients: dict[str, Any] = {}
            for i in (0, 1):
                for key in order:
                    made = run(key, "F", lambda key=key, i=i: cuts[key].forward(i, inputs[key]))
                    gradients[key] = None if made.dim() == 0 else 1e-3 * torch.ones_like(made)
            for i in (0, 1) if not frozen else ():
                for key in reversed(order):
                    ahead = gradients[key]
                    run(key, "B", lambda key=key, i=i, g=ahead: cuts[key].backward(i, g))
            self.drain()
            for key, op, a, b in stamps:
                took = b - a if self.processor else a.elapsed_time(b) * 1e-3
                name = str(int(key[-1]) % 2) if key.startswith("half") else key
                if turn >= 0:
                    seconds.setdefault((name, op), []).append(took)
        found: dict[str, dict[str, float]] = {}
        for (name, op), values in seconds.items():
            found.setdefault(name, {"F": 0.0, "B": 0.0})[op] = float(np.median(values))
        return found

    def _open_waiting(self) -> None:
        """Several connections each way between neighbours, as a step has them."""
        import torch
        import torch.distributed as dist

        from foreplan.planner.verify.channels import _pair_options

        self._ways: dict[tuple[int, int, int], Any] = {}
        self._coming: list[Any] = []
        self._message = torch.zeros(1 << 20, device=self.device)
        for a in range(0, RANKS, 2):
            for source, target in ((a, a + 1), (a + 1, a)):
                for k in range(WAITING):
                    options = _pair_options(timedelta(seconds=60))
                    group = self._new_group([a, a + 1], backend="nccl", pg_options=options)
                    if self.rank in (source, target):
                        # Both ends have to make a communicator before one of them waits on it.
                        dist.all_reduce(self._message, group=group)
                        self._ways[source, target, k] = group, torch.cuda.Stream()
        self.sync()
        dist.barrier()

    def _wait_for_partner(self, *, post: bool) -> None:
        """Post receives of the partner's messages, or send it its own."""
        import torch

        for (source, target, _), (group, stream) in self._ways.items():
            with torch.cuda.stream(stream):
                if post and target == self.rank:
                    self._coming.append(torch.empty_like(self._message))
                    group.recv(self._coming[-1:], source % 2, 0)
                elif not post and source == self.rank:
                    group.send([self._message], target % 2, 0)
        if not post:
            self.sync()
            self._coming.clear()

    def _memory_rates(self) -> dict[str, float]:
        import torch

        from foreplan.planner.bubbles.execution.flat_parameters import FlatParameters

        size = 1 << (20 if self.processor else 28)
        a, b = (torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2))
        copy = self.timed(lambda: b.copy_(a))

        class Flat(FlatParameters):
            """Parameters without a model."""

        layer = torch.nn.Linear(1024, size // 4096, bias=False, device="meta")

        class Part:
            def names(self) -> Any:
                return [("weight", layer, "weight")]

        flat = Flat([Part()], 0, self.device, self.dtype)
        step = self.timed(flat.optimize)
        count = flat.weights.numel()
        copies = 0.0 if self.processor else 3 * count * copy / size
        return {
            "copy_s_per_byte": copy / size,
            "optimizer_s_per_parameter": max(step - copies, 0.1 * step) / count,
        }

    def _tier(self) -> dict[str, Any]:
        """Links as fits: messages with computation beside them, collectives alone."""
        import torch
        import torch.distributed as dist

        fits = [self._messages()]
        four = dist.new_group(list(range(RANKS)), backend=self.backend)
        two = [dist.new_group([a, a + 1], backend=self.backend) for a in range(0, RANKS, 2)]
        pair = two[self.rank // 2]
        sizes = (1 << 14, 1 << 16) if self.processor else (1 << 22, 1 << 25, 1 << 28)
        for kind, ranks, group in (
            ("all_reduce", 2, pair), ("all_reduce", 4, four), ("all_gather", 4, four),
            ("reduce_scatter", 4, four),
        ):  # fmt: skip
            seconds = []
            for size in sizes:
                whole = torch.zeros(size // 4, device=self.device)
                own = whole.chunk(ranks)[self.rank % ranks]
                if self.processor:
                    own = own.clone()
                run = {
                    "all_reduce": lambda w=whole, g=group: dist.all_reduce(w, group=g),
                    "all_gather": lambda w=whole, o=own, g=group: dist.all_gather_into_tensor(
                        w, o, group=g
                    ),
                    "reduce_scatter": lambda w=whole, o=own, g=group: dist.reduce_scatter_tensor(
                        o, w, group=g
                    ),
                }[kind]
                dist.barrier()
                seconds.append(self.timed(run))
            fits.append(_fit(kind, ranks, sizes, seconds))
        # Lanes sum what is priced as a gather and a scatter of the same bytes.
        sums = fits[1]
        half = {"alpha_s": sums["alpha_s"] / 2, "beta_s_per_byte": sums["beta_s_per_byte"] / 2}
        fits += [sums | half | {"kind": kind} for kind in ("all_gather", "reduce_scatter")]
        merged: list[Any] = [None] * RANKS
        dist.all_gather_object(merged, fits)
        message = merged[0][0]
        return {
            "group": ["all"], "scope": "host", "latency_s": message["alpha_s"],
            "bandwidth_bytes_per_s": 1.0 / max(message["beta_s_per_byte"], 1e-15),
            "collectives": merged[0], "backend": self.backend,
            "source": "measured in this run, messages beside computation",
        }  # fmt: skip

    def _messages(self) -> dict[str, Any]:
        """Messages to and fro between neighbours while both multiply matrices."""
        import torch
        import torch.distributed as dist

        from foreplan.planner.verify.channels import _pair_options

        sizes = (1 << 14, 1 << 16) if self.processor else MESSAGES
        partner, lower = self.rank ^ 1, self.rank % 2 == 0
        options = None if self.processor else _pair_options(timedelta(seconds=60))
        pairs = [[a, a + 1] for a in range(0, RANKS, 2)]
        groups = [dist.new_group(p, backend=self.backend, pg_options=options) for p in pairs]
        group = groups[self.rank // 2]
        a = torch.randn(256 if self.processor else 4096, 256 if self.processor else 4096)
        a = a.to(self.device, self.dtype)
        stream = None if self.processor else torch.cuda.Stream()
        seconds = []
        for k, size in enumerate(sizes):
            message = torch.zeros(size, dtype=torch.uint8, device=self.device)

            def trip(message: Any = message, k: int = k) -> None:
                if self.peers is not None:
                    own, other = 10 * self.rank + k, 10 * partner + k
                    if lower:
                        self.peers.send(other, message, stream)
                    self.peers.receive(own, stream)
                    if not lower:
                        self.peers.send(other, message, stream)
                elif lower:
                    dist.send(message, partner, group=group)
                    dist.recv(message, partner, group=group)
                else:
                    dist.recv(message, partner, group=group)
                    dist.send(message, partner, group=group)

            found = []
            for turn in range(6):
                dist.barrier()
                if stream is None:
                    took = self.timed(trip, 1)
                else:
                    for _ in range(12):  # about 4 ms of products
                        torch.mm(a, a)
                    with torch.cuda.stream(stream):
                        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                        begin.record()
                        trip()
                        end.record()
                    self.sync()
                    took = begin.elapsed_time(end) * 1e-3
                if turn > 1:
                    found.append(took / 2)
            seconds.append(float(np.median(found)))
        return _fit("p2p", 2, sizes, seconds)

    # ------------------------------------------------------------------------------------ running

    def run(self, name: str, found: dict[str, Any], results: dict[str, Any]) -> None:
        """Run every decision of a shape; equal ones once."""
        workload, cluster = workload_of(name, self.processor), cluster_of(None, self.processor)
        problem = Problem(None, cluster, workload, CostBook(()))
        seen: dict[str, str] = {}
        for label, plan in found["decisions"].items():
            if "impossible" in plan:
                continue
            decision = validate(BubblesDecision, plan["decision"], label)
            text = json.dumps([plan["decision"][k] for k in ("orders", "stages", "encoders")])
            if text in seen:
                results[label] = {"as": seen[text], "predicted_s": plan["predicted_s"]}
                continue
            seen[text] = label
            compared = name in COMPARED and label == "measured"
            row = self._steps(problem, decision, compared)
            if name in COMPARED[:1] and label == "measured" and self.peers:
                other = self._steps(problem, decision, False, keeps=False)
                row["by_nccl"] = {k: other[k] for k in ("measured_s", "rounds_s", "actions")}
                self.say(f"{label}, messages by NCCL: {1e3 * other['measured_s']:.1f} ms")
            if self.rank == 0:
                predicted = {k: plan[k] for k in ("predicted_s", "bubbles", "metrics", "actions")}
                results[label] = row | {"predicted_s": plan["predicted_s"], "predicted": predicted}
                self.say(
                    f"{name} | {label}: predicted {1e3 * plan['predicted_s']:.1f} ms, measured "
                    f"{1e3 * row['measured_s']:.1f} {[round(1e3 * t, 1) for t in row['rounds_s']]}"
                    f", inside {row['bubbles']['inside_share']:.2f}"
                    f", filled {row['bubbles']['filled_share']:.2f}"
                    f" {row.get('agreement', '')}"
                )

    def _steps(
        self, problem: Problem[BubblesWorkload], decision: BubblesDecision, compared: bool, *,
        keeps: bool = True,
    ) -> dict[str, Any]:  # fmt: skip
        import torch.distributed as dist

        from foreplan.planner.bubbles.execution.entry import (
            compare_steps,
            rank_kernels,
            reference_step,
        )
        from foreplan.planner.verify.channels import connect
        from foreplan.planner.verify.clock import Clock, CudaClock, HostClock
        from foreplan.planner.verify.measured import measured_timeline
        from foreplan.planner.verify.rank_program import rank_programs
        from foreplan.planner.verify.runtime import Runtime

        schedule, _ = PLANNER.real(problem, decision)
        programs = rank_programs(schedule, ordered=not self.processor)
        count = len(programs[self.rank].steps)
        clock: Clock = HostClock(count) if self.processor else CudaClock(count, self.device)
        channels = connect(
            programs, self.rank, backend=self.backend, clock=clock, device=self.device,
            timeout_s=60.0,
        )  # fmt: skip
        kernels = rank_kernels(problem, decision, self.rank, mode="fast")
        kernels.keeps_buffers = keeps
        runtime = Runtime(programs[self.rank], kernels, channels, clock)
        timelines = []
        for turn in range(ROUNDS + 1):
            kernels.reset()
            self.sync()
            record = runtime.execute(dist.barrier)
            records: list[Any] = [None] * RANKS
            dist.all_gather_object(records, record)
            if turn:
                timelines.append(measured_timeline(schedule, records))
        totals = [timeline.makespan_s for timeline in timelines]
        middle = timelines[sorted(range(len(totals)), key=totals.__getitem__)[len(totals) // 2]]
        row: dict[str, Any] = {
            "measured_s": float(np.median(totals)), "rounds_s": totals,
            "bubbles": bubbles_of(middle), "actions": actions_of(middle),
            "memory_bytes": kernels.memory_bytes(),
        }  # fmt: skip
        parts: list[Any] = [None] * RANKS
        if compared:
            dist.all_gather_object(parts, kernels.result())
        del runtime, channels
        gc.collect()
        dist.barrier()  # nobody has the memory open now
        del kernels
        self.free()
        if compared and self.rank == 0:
            merged = {key: value for part in parts for key, value in part.items()}
            agreed = compare_steps(merged, reference_step(problem, decision, mode="fast"))
            row["agreement"] = {"passed": agreed.passed, "exact": agreed.exact} | dict(
                agreed.details
            )
        if compared:
            self.free()
            dist.barrier()
        return row


def _alone(size: int) -> Any:
    """Lanes without neighbours: a lane's share of the work, and no sums."""
    from foreplan.planner.bubbles.execution.lanes import Lanes

    class Alone(Lanes):
        def sum(self, x: Any) -> None:
            pass

    return Alone(size, 0)


def _fit(kind: str, ranks: int, sizes: Any, seconds: Any) -> dict[str, Any]:
    times = np.asarray(seconds)
    beta, alpha = np.polyfit(np.asarray(sizes, dtype=float), times, 1, w=1 / times)
    alpha, beta = max(float(alpha), 1e-6), max(float(beta), 1e-14)
    off = [abs(alpha + beta * size - s) / s for size, s in zip(sizes, seconds, strict=True)]
    return {
        "kind": kind, "ranks": ranks, "alpha_s": alpha, "beta_s_per_byte": beta,
        "residual": float(np.median(off)), "samples": len(sizes),
    }  # fmt: skip


def be_rank(rank: int, folder: Path, names: list[str], processor: bool, deadline: float) -> None:
    import torch.distributed as dist

    ranks = Ranks(rank, folder, processor)
    ranks.say("measuring")
    ranks.measure(names)
    ranks.say("measured; waiting for plans")
    everything: dict[str, Any] = {}
    for name in names:
        path = folder / f"plans.{slug(name)}.json"
        late: list[Any] = [None]
        while rank == 0 and not path.exists() and time.time() < deadline:
            time.sleep(0.05)
        if rank == 0:
            late = [time.time() > deadline]
        dist.broadcast_object_list(late)
        if late[0]:
            ranks.say(f"{name}: no time left")
            break
        found = json.loads(path.read_text())
        if "failed" in found:
            ranks.say(f"{name}: no plan: {found['failed']}")
            everything[name] = found
            continue
        results: dict[str, Any] = {}
        everything[name] = {k: v for k, v in found.items() if k != "decisions"}
        everything[name]["results"] = results
        ranks.run(name, found, results)
        if rank == 0:
            write(folder / "results.json", everything)
    if not processor and time.time() < deadline:
        dist.barrier()
        beside = ranks.beside_receives(names[0])
        ranks.say(f"beside receives: {beside}")
        if rank == 0:
            write(folder / "receives.json", beside)
    dist.barrier()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=list(SHAPES))
    parser.add_argument("--processor", action="store_true")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--deadline", type=float)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--plan")
    options = parser.parse_args()
    folder = options.folder
    if options.plan is not None:
        try:
            plan_shape(options.plan, folder, options.processor)
        except BaseException as error:
            failed = {"failed": f"{type(error).__name__}: {error}"}
            write(folder / f"plans.{slug(options.plan)}.json", failed)
            raise
        return 0
    if options.rank is not None:
        be_rank(options.rank, folder, options.only, options.processor, options.deadline)
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.json"):
        old.unlink()
    deadline = time.time() + options.seconds
    common = [sys.executable, __file__, str(folder), "--only", *options.only]
    common += ["--processor"] if options.processor else []
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    }  # fmt: skip
    jobs = [["--plan", name] for name in options.only]
    jobs += [["--rank", str(r), "--deadline", str(deadline)] for r in range(RANKS)]
    with tempfile.TemporaryDirectory() as scratch:
        environment["BUBBLES_STORE"] = str(Path(scratch) / "store")
        processes = [subprocess.Popen([*common, *job], env=environment) for job in jobs]
        ranks = processes[-RANKS:]
        try:
            while any(rank.poll() is None for rank in ranks):
                if any(rank.poll() for rank in ranks) or time.time() > deadline + 25.0:
                    return 1  # one that failed would keep the others waiting
                time.sleep(0.2)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
