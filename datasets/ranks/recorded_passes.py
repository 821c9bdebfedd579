"""`measure_recorded`: what a training step's programs take on GPUs, as parts of a recorded pass.

A profile replays each by itself, behind itself. A step replays whole passes, in which programs wait
for their code and constants, at another clock (`foreplan.datasets.timing.recorded_programs`). GPUs
share neither caches nor memory, so that none has to be timed beside others; they are timed at the
same time to save it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from statistics import fmean

from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.program import Program
from foreplan.datasets.ranks.together import PassTimes
from foreplan.datasets.timing.measuring import Effort, Worker

#: Every program is recorded, one after the other, before a process answers.
_EFFORT = Effort(timeout_s=600.0)


def measure_recorded(
    devices: Sequence[DeviceName],
    calls: Mapping[Program, int],
    price_s: Mapping[DeviceName, Mapping[Program, float]],
    *,
    cores: Sequence[Sequence[int]],
) -> PassTimes:
    """Time a pass on each GPU as one CUDA graph, over its price.

    Slices of one GPU are timed one after the other.

    Args:
        devices: GPUs or slices of some.
        calls: programs of a pass, each with its number of calls.
        price_s: seconds of a call of each program by each device's profile.
        cores: of each device's process.

    Returns:
        As of one rank alone. A program that cannot be recorded has no factor and keeps its price.
    """
    programs: dict[DeviceName, dict[Program, float]] = {}
    waiting = dict(zip(devices, cores, strict=True))
    while waiting:
        # The first that is left of each GPU.
        group = {device.index: device for device in reversed(waiting)}.values()
        with contextlib.ExitStack() as stack:
            workers = [
                stack.enter_context(Worker(device, cores=waiting.pop(device))) for device in group
            ]
            for worker in workers:
                worker.send_pass(tuple(calls.items()), _EFFORT, recorded=True)
            for worker in workers:
                found = worker.receive_pass(len(calls), _EFFORT)
                programs[worker.device] = {
                    item: fmean(took.times_s) / price_s[worker.device][item]
                    for item, took in zip(calls, found, strict=True) if took.error is None
                }  # fmt: skip
    return PassTimes({1: fmean(_whole(calls, price_s[d], programs[d]) for d in devices)}, programs)


def _whole(
    calls: Mapping[Program, int], price_s: Mapping[Program, float], factors: Mapping[Program, float]
) -> float:
    """Time of the pass over its price."""
    prices = {item: price_s[item] * count for item, count in calls.items()}
    return sum(factors.get(item, 1.0) * s for item, s in prices.items()) / sum(prices.values())
