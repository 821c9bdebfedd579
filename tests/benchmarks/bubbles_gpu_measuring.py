"""`Measuring`: what one process of `bubbles_on_gpus.py` measures: towers and rates of memory."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from bubbles_gpu_links import LinkMeasuring
from bubbles_gpu_patience import write
from bubbles_gpu_plans import RANKS, cluster_of, tower_key, workload_of

from foreplan.cost_models.costs import CostBook
from foreplan.planner.base import Problem
from foreplan.planner.bubbles.training_step import TrainingStep

#: What keeps a GPU busy while the host queues a round, some 60 ms on an H200: cycles of sleep, or
#: so many seconds of a tower's own rounds. The longest round, host and device together, took 18 ms
#: when nothing kept it busy. Behind sleeps the clock is 1980 MHz and behind large products 1700,
#: and passes take 11 to 18 % longer; in steps it is 1790 to 1950, the lower the longer a rank is at
#: work and the larger its layers. Prices are half way between those of a GPU that rests and of one
#: that does nothing else than such rounds.
AHEAD_CYCLES, AHEAD_S, MOST_AHEAD = 120_000_000, 0.06, 400
#: Rounds before those that count: half a second until the clock has settled.
WARM_ROUNDS, ROUNDS = 6, 6


class Measuring(LinkMeasuring):
    """A process that measures; all call the same methods at the same time."""

    def measure(self, names: list[str]) -> None:
        import torch
        import torch.distributed as dist

        tasks: dict[str, tuple[str, str]] = {}
        for name in names:
            for key, tower in self._towers(name):
                tasks.setdefault(key, (name, tower))
        mine = list(tasks.items())[self.rank :: RANKS]
        self._alone = {key: self._tower_runs(*task) for key, task in mine}
        times = {key: self._price_tower(runs) for key, runs in self._alone.items()}
        parts: list[Any] = [None] * RANKS
        dist.all_gather_object(parts, times)
        self.say(f"{len(tasks)} towers measured")
        towers = {k: v for part in parts for k, v in part.items()}
        found = {
            "board": "h200" if self.processor else torch.cuda.get_device_name(),
            "towers": towers,
            **self._memory_rates(),
            "tier": self.tier(),
        }
        if self.rank == 0:
            write(self.folder / "prices.json", found)
        self._alone.clear()
        self.free()

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

    def _price_tower(self, runs: Any) -> dict[str, dict[str, float]]:
        """Seconds half way between those of a GPU that rests between rounds and one that does not.

        As `_time_tower`.
        """
        rested = self._time_tower(runs)
        if self.processor:
            return rested
        at_work = self._time_tower(runs, rests=False)
        return {
            name: {op: float(np.sqrt(first * at_work[name][op])) for op, first in times.items()}
            for name, times in rested.items()
        }

    def _time_tower(self, runs: Any, *, rests: bool = True) -> dict[str, dict[str, float]]:
        """Forward and backward seconds by half (0 attention, 1 MLP), ``entry`` and ``exit``.

        On a GPU each is a graph, as in a step, and a round is queued while the GPU is busy with
        something else, so that it waits for nothing: it sleeps meanwhile, or runs such rounds if
        it never ``rests``.
        """
        import torch

        calls = list(self._tower_calls(runs))
        if not self.processor:
            from foreplan.planner.verify.pass_graphs import PassGraphs

            graphs = PassGraphs(self.device)
            graphs.warm_up(lambda: [work() for *_, work in calls])  # type: ignore[arg-type]
            with torch.autograd.set_multithreading_enabled(False):
                calls = [(key, op, graphs.record(work)) for key, op, work in calls]
        seconds: dict[tuple[str, str], list[float]] = {}
        ahead = None if self.processor else self._ahead([w for *_, w in calls], rests=rests)
        for turn in range(-2 if rests else -WARM_ROUNDS, ROUNDS):
            stamps: list[tuple[str, str, Any, Any]] = []
            if ahead is not None:
                ahead()
            for key, op, work in calls:
                if self.processor:
                    before = time.perf_counter()
                    work()
                    stamps.append((key, op, before, time.perf_counter()))
                else:
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    work()
                    end.record()
                    stamps.append((key, op, begin, end))
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

    def _tower_calls(self, runs: Any) -> Iterator[tuple[str, str, Callable[[], None]]]:
        """Passes of two micro-batches in turn, each with the part that it is of."""
        import torch

        cuts, inputs, frozen, _ = runs
        order = ["entry", *(f"half {k}" for k in range(4)), "exit"]
        above: dict[tuple[str, int], Any] = {}

        def forward(key: str, i: int) -> None:
            made = cuts[key].forward(i, inputs[key])
            if (key, i) not in above:
                # As unlike as those of a step: a GPU multiplies equal numbers at less power.
                above[key, i] = None if made.dim() == 0 else 1e-3 * torch.randn_like(made)

        def backward(key: str, i: int) -> None:
            cuts[key].backward(i, above[key, i])

        for i in (0, 1):
            for key in order:
                yield key, "F", partial(forward, key, i)
        for i in (0, 1) if not frozen else ():
            for key in reversed(order):
                yield key, "B", partial(backward, key, i)

    def _ahead(self, calls: list[Callable[[], Any]], *, rests: bool) -> Callable[[], None]:
        """What keeps a GPU busy while the host gets ahead."""
        import torch

        if rests:
            return lambda: torch.cuda._sleep(AHEAD_CYCLES)

        def one_round() -> None:
            for call in calls:
                call()

        times = min(MOST_AHEAD, math.ceil(AHEAD_S / self.timed(one_round, 3)))

        def rounds() -> None:
            for _ in range(times):
                one_round()

        return rounds

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


def _alone(size: int) -> Any:
    """Lanes without neighbours: a lane's share of the work, and no sums."""
    from foreplan.planner.bubbles.execution.lanes import Lanes

    class Alone(Lanes):
        def sum(self, x: Any) -> None:
            pass

    return Alone(size, 0)
