"""`Timed`: a loaded stage of a decoder whose passes are timed, for the benchmarks beside it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from resource import RUSAGE_SELF, getrusage

import torch

from foreplan.datasets.models.decoder_memory import stage_bytes
from foreplan.datasets.models.model import Model
from foreplan.datasets.models.weights import open_weights
from foreplan.planner.serving.pricing import DECODE, PREFILL, StageKernels
from foreplan.planner.verify.decoder import DecoderStage
from foreplan.planner.verify.pass_graphs import PassGraphs
from foreplan.planner.verify.stage_kernels import PhaseKernels
from foreplan.planner.verify.stage_kernels import StageKernels as LoadedKernels

#: Three layers, one of each number of bits.
BITS = (16, 8, 4)
STORAGE = {16: "bf16", 8: "int8", 4: "int4"}


class Timed:
    """A loaded stage whose passes are timed.

    Args:
        model: the model, whose last layers are loaded.
        kernels: what runs them.
        device: torch device.
        layers: bits of each layer.
        head: load the head as well; else the layers end one before the model's last.
    """

    def __init__(
        self, model: Model, kernels: StageKernels, device: torch.device,
        layers: Sequence[int] = BITS, *, head: bool = True,
    ) -> None:  # fmt: skip
        def both(op: str, bits: int | None = None) -> PhaseKernels:
            return PhaseKernels(*(kernels.variant(p, op, bits) for p in (PREFILL, DECODE)))

        self.device = device
        self.model = model
        self.layers = tuple(layers)
        end = model.layers if head else model.layers - 1
        self.stage = DecoderStage(
            model, end - len(self.layers), end, prefill_batches=[1], decode_batches=[1], prompt=1,
            positions=2, device=str(device),
        )  # fmt: skip
        loaded = LoadedKernels(tuple(both("linear", b) for b in self.layers), both("attention"),
                               both("head"))  # fmt: skip
        self.stage.load(open_weights(model, device=device), loaded)
        # One for all passes: a library keeps a buffer for every stream it has worked on.
        self.graphs = None if device.type == "cpu" else PassGraphs(device)

    def seconds(self, batch: int, tokens: int, context: int) -> float:
        """Median time of a pass: of a prompt, or of one token with ``context`` positions behind."""
        prefill = tokens > 1
        room = tokens if prefill else context
        self.stage.resize([batch], [batch], tokens if prefill else room - 1, room)
        x = torch.randn(batch * tokens, self.model.hidden, device=self.device).bfloat16()
        run = self.stage.prefill if prefill else partial(self.stage.decode, step=1)
        body: Callable[[], None] = partial(run, 0, x=x)  # type: ignore[arg-type]
        if self.graphs is None:
            body()
            return statistics.median(_on_core(body) for _ in range(3))
        torch.cuda.reset_peak_memory_stats(self.device)
        self.graphs.warm_up(body)
        replay = self.graphs.record(body)
        return statistics.median(_on_gpu(replay) for _ in range(7))

    def peak_bytes(self) -> int | None:
        """Most bytes that tensors held since the last timed pass began; ``None`` of a CPU."""
        if self.device.type == "cpu":
            return None
        return int(torch.cuda.max_memory_allocated(self.device))

    def static_bytes(self, batch: int, positions: int) -> int:
        """What the ledger says that the stage holds."""
        storage = [STORAGE[bits] for bits in self.layers]
        return sum(
            stage_bytes(
                self.model, self.stage.start, self.stage.end, storage, batch=batch,
                positions=positions,
            ).values()
        )  # fmt: skip


def _wall(body: Callable[[], None]) -> float:
    started = time.perf_counter()
    body()
    return time.perf_counter() - started


def _on_core(body: Callable[[], None]) -> float:
    """Seconds on the core where another process had it meanwhile, else on the wall: as a profile
    counts them."""
    switches, worked = getrusage(RUSAGE_SELF).ru_nivcsw, time.process_time()
    seconds = _wall(body)
    worked = time.process_time() - worked
    return min(seconds, worked) if getrusage(RUSAGE_SELF).ru_nivcsw != switches else seconds


def _on_gpu(replay: Callable[[], None]) -> float:
    """Seconds of a replay behind another one, so that its launch does not count."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    before.record()
    replay()
    after.record()
    after.synchronize()
    return 1e-3 * float(before.elapsed_time(after))


def launch_seconds(timed: Timed, batch: int, context: int) -> tuple[float, float]:
    """Host seconds of a decode pass: replayed from a graph, and issued kernel by kernel."""
    timed.seconds(batch, 1, context)
    x = torch.randn(batch, timed.model.hidden, device=timed.device).bfloat16()
    body: Callable[[], None] = partial(timed.stage.decode, 0, 1, x)  # type: ignore[arg-type]
    assert timed.graphs is not None
    timed.graphs.warm_up(body)
    found = []
    for call in (timed.graphs.record(body), body):
        times = []
        for _ in range(30):
            torch.cuda.synchronize()
            times.append(_wall(call))
        found.append(statistics.median(times))
    torch.cuda.synchronize()
    return found[0], found[1]
