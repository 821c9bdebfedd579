"""`Measuring`: what one process of `bubbles_on_gpus.py` measures: towers, rates, links."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
from bubbles_gpu_plans import MESSAGES, RANKS, WAITING, cluster_of, tower_key, workload_of, write
from bubbles_gpu_process import Process

from foreplan.cost_models.costs import CostBook
from foreplan.planner.base import Problem
from foreplan.planner.bubbles.training_step import TrainingStep

#: Cycles that a GPU is kept busy while the host queues a round: some 60 ms at 2 GHz; the longest
#: round, host and device together, took 18 ms when nothing kept it busy.
AHEAD_CYCLES = 120_000_000


class Measuring(Process):
    """A process that measures; all call the same methods at the same time."""

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
        """Forward and backward seconds by half (0 attention, 1 MLP), ``entry`` and ``exit``.

        The GPU is kept busy until the host has queued a whole round, so that ``F`` and ``B`` are
        the device's own; ``host F`` and ``host B`` are what the host takes to queue them.
        """
        import torch

        cuts, inputs, frozen, _ = runs
        order = ["entry", *(f"half {k}" for k in range(4)), "exit"]
        seconds: dict[tuple[str, str], list[float]] = {}
        for turn in range(-2, 4):
            stamps: list[tuple[str, str, Any, Any]] = []

            def run(key: str, op: str, work: Callable[[], Any], stamps: Any = stamps) -> Any:
                before = time.perf_counter()
                if self.processor:
                    made = work()
                else:
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    made = work()
                    end.record()
                    stamps.append((key, op, begin, end))
                after = time.perf_counter()
                stamps.append((key, op if self.processor else f"host {op}", before, after))
                return made

            if not self.processor:
                torch.cuda._sleep(AHEAD_CYCLES)

            gradients: dict[str, Any] = {}
            for i in (0, 1):
                for key in order:
                    made = run(key, "F", lambda key=key, i=i: cuts[key].forward(i, inputs[key]))
                    # As unlike as those of a step: a GPU multiplies equal numbers at less power.
                    gradients[key] = None if made.dim() == 0 else 1e-3 * torch.randn_like(made)
            for i in (0, 1) if not frozen else ():
                for key in reversed(order):
                    ahead = gradients[key]
                    run(key, "B", lambda key=key, i=i, g=ahead: cuts[key].backward(i, g))
            self.drain()
            for key, op, a, b in stamps:
                took = b - a if isinstance(a, float) else a.elapsed_time(b) * 1e-3
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

        from foreplan.planner.bubbles.execution.flat_parameters import FlatParameters, optimize

        size = 1 << (20 if self.processor else 28)
        a, b = (torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2))
        copy = self.timed(lambda: b.copy_(a)) / size

        class Flat(FlatParameters):
            """Parameters without a model."""

        def optimizing(count: int) -> float:
            """Seconds of a step over so many parameters, without rounding the weights."""
            layer = torch.nn.Linear(1024, count // 1024, bias=False, device="meta")

            class Part:
                def names(self) -> Any:
                    return [("weight", layer, "weight")]

            flat = Flat([Part()], 0, self.device, self.dtype)
            step = self.timed(lambda: optimize([flat]))
            return step - (0.0 if self.processor else 3 * count * copy)

        # Two sizes: a call has a share of its own, which parameters do not add to.
        few, many = size // 4, size
        one, other = optimizing(few), optimizing(many)
        each = max((other - one) / (many - few), 0.1 * one / few)
        return {
            "copy_s_per_byte": copy, "optimizer_s_per_parameter": each,
            "optimizer_s": max(0.0, one - few * each),
        }  # fmt: skip

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
            "compute_share": self._compute_share(pair),
        }  # fmt: skip

    def _compute_share(self, group: Any) -> float:
        """What products lose to a sum beside them, as a share of its time; as in a profile."""
        import torch
        import torch.distributed as dist

        whole = torch.zeros((1 << 16) if self.processor else (1 << 26), device=self.device)
        size = 256 if self.processor else 4096
        a = torch.randn(size, size, device=self.device).to(self.dtype)
        alone = self.timed(lambda: dist.all_reduce(whole, group=group))
        count = max(1, round(3.0 * alone / self.timed(lambda: torch.mm(a, a))))
        counts: list[Any] = [count]
        dist.broadcast_object_list(counts)

        def products(*, beside: bool) -> None:
            work = dist.all_reduce(whole, group=group, async_op=True) if beside else None
            for _ in range(counts[0]):
                torch.mm(a, a)
            if work is not None:
                work.wait()

        lost = []
        for _ in range(5):
            dist.barrier()
            without = self.timed(lambda: products(beside=False), 1)
            dist.barrier()
            lost.append(self.timed(lambda: products(beside=True), 1) - without)
        told: list[Any] = [min(1.0, max(0.0, float(np.median(lost)) / alone))]
        dist.broadcast_object_list(told)
        return float(told[0])

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


def _alone(size: int) -> Any:
    """Lanes without neighbours: a lane's share of the work, and no sums."""
    from foreplan.planner.bubbles.execution.lanes import Lanes

    class Alone(Lanes):
        def sum(self, x: Any) -> None:
            pass

    return Alone(size, 0)


def _fit(kind: str, ranks: int, sizes: Any, seconds: Any) -> dict[str, Any]:
    times, lengths = np.asarray(seconds), np.asarray(sizes, dtype=float)
    beta, alpha = (float(x) for x in np.polyfit(lengths, times, 1, w=1 / times))
    if alpha < 0.0:
        alpha, beta = 1e-6, float(np.median(times / lengths))
    beta = max(beta, 1e-14)
    off = [abs(alpha + beta * size - s) / s for size, s in zip(sizes, seconds, strict=True)]
    return {
        "kind": kind, "ranks": ranks, "alpha_s": alpha, "beta_s_per_byte": beta,
        "residual": float(np.median(off)), "samples": len(sizes),
    }  # fmt: skip
