"""Measure how ranks of one host slow each other down when they work at the same time.

Two programs stand for the two phases of decoding: a linear of one row, bound by memory bandwidth,
and one of many rows, bound by arithmetic (whose cores share power and caches). Each is timed on
its own and while other ranks run the same without a pause.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Iterable, Sequence

from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.tier import Contention, ContentionKind
from foreplan.datasets.timing.measuring import Effort, Worker
from foreplan.errors import MissingDataError, SpecError

_BF16 = Variant("bf16", "bf16", "torch.linear")
_FP32 = Variant("fp32", "fp32", "torch.linear")

#: What is run for each kind. The arithmetic is fp32, which every instruction set does well.
PROGRAMS: dict[ContentionKind, Program] = {
    "memory": program("linear", _BF16, rows=1, n=4096, k=2048),
    "compute": program("linear", _FP32, rows=256, n=1024, k=1024),
}
#: Neighbours start this long before the measured rank, and run this much longer.
_LEAD_S, _TAIL_S = 0.2, 0.3


def measure_contention(
    device: DeviceName,
    *,
    ranks: Iterable[int] = (2,),
    cores: Sequence[Sequence[int]] | None = None,
    repeats: int = 5,
    measure_s: float = 0.3,
    host: str | None = None,
) -> tuple[Contention, ...]:
    """Measure slowdown factors among equal CPU ranks of this host.

    Alone and together, in all numbers, are measured in turn, ``repeats`` times, and the median of
    the ratios is kept, so that a drift of the machine's speed does not show as contention.

    Args:
        device: what every rank is.
        ranks: numbers of ranks at work together.
        cores: cores of each rank; by default consecutive ones, as many as the device has threads.
        repeats: times that each number is measured.
        measure_s: how long each of them lasts, in seconds.
        host: name of this host in the cluster; ``None`` says the factors of every host.

    Returns:
        One `Contention` for memory and one for compute. Factors of rank counts for which there are
        no cores are left out; empty if that leaves none.

    Raises:
        SpecError: a device that is no CPU.
        MissingDataError: a rank could not be measured.
    """
    if device.kind != "cpu":
        raise SpecError("device", got=str(device), expected="a CPU device")
    places = [tuple(place) for place in (_places(device) if cores is None else cores)]
    counts = sorted({count for count in ranks if 2 <= count <= len(places)})
    if not counts:
        return ()
    factors: dict[ContentionKind, dict[int, float]] = {kind: {} for kind in PROGRAMS}
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(device, cores=place)) for place in places[: counts[-1]]
        ]
        for kind, item in PROGRAMS.items():
            ratios: dict[int, list[float]] = {count: [] for count in counts}
            for _ in range(repeats):
                alone = _time(workers[:1], item, measure_s)
                for count, each in ratios.items():
                    each.append(_time(workers[:count], item, measure_s) / alone)
            factors[kind] = {count: statistics.median(each) for count, each in ratios.items()}
    return tuple(
        Contention(
            kind=kind,
            factors=found,
            host=host,
            source=f"measured: {PROGRAMS[kind]} on {device}",
        )
        for kind, found in factors.items()
    )


def _places(device: DeviceName) -> list[tuple[int, ...]]:
    mine = sorted(os.sched_getaffinity(0))
    width = device.threads or len(mine)
    return [tuple(mine[start : start + width]) for start in range(0, len(mine) - width + 1, width)]


def _time(workers: Sequence[Worker], item: Program, measure_s: float) -> float:
    """Seconds a call takes on the first worker while all others run the same."""
    first, others = workers[0], workers[1:]
    longer = measure_s + _LEAD_S + _TAIL_S
    background = Effort(longer, 1, longer, timeout_s=longer + 60.0, max_samples=1 << 30)
    short = Effort(min_s=0.0, min_samples=1)
    # Inputs are made before the clock starts, so that all of them run when it does.
    for worker in workers:
        _median(worker, item, short)
    if others:
        for worker in others:
            worker.send_program(item, background)
        time.sleep(_LEAD_S)
    effort = Effort(measure_s, 5, measure_s, max_samples=1 << 30)
    median = _median(first, item, effort)
    for worker in others:
        result = worker.receive_measurement(background)
        if result.error is not None:
            raise MissingDataError(f"contention on {worker.device}: {result.error}")
    return median


def _median(worker: Worker, item: Program, effort: Effort) -> float:
    result = worker.measure(item, effort)
    if result.error is not None or math.isnan(result.median_s):
        raise MissingDataError(f"contention on {worker.device}: {result.error}")
    return result.median_s
