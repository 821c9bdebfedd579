"""`measure_together`: what a training step's programs take while several ranks of a host run them.

A profile times a program alone, on operands that no cache holds. A rank of a step finds some of
them in its caches, and has neighbours that want the same cache, memory and power; and its core is
one of several, which run at speeds of their own. So programs of a pass are run as a pass runs them
(`foreplan.datasets.timing.measuring.Worker.send_pass`), by one rank, two, ... all of them at once,
and their times are put over what the profile says of them: of one rank program by program, as what
the caches hold differs most by program; of several that of the whole pass.

A host runs faster in one minute than in the next. So a few programs of the pass are timed again as
the profile did, between the turns, and what they take longer than by it is no part of the factors:
two profiles of one step, ten minutes apart, had factors of 1.005 and 0.94 without that. On a host
that others share a core runs at half of its speed in one half second and at all of it in the next,
so that these few programs say nothing: what lies within their scatter is not taken off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from statistics import fmean, median, stdev
from typing import NamedTuple

from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.program import Program
from foreplan.datasets.timing.measuring import Effort, Worker
from foreplan.errors import MissingDataError

#: Groups of a size at most that are timed, one after the other: all cores of a small host.
_GROUPS = 8
#: Programs that tell the host's speed, those that most of a pass is priced by, and how long each is
#: timed (chosen; their inputs are as large as four caches each).
_TELLING, _ALONE = 6, Effort(min_s=0.02, min_samples=5, max_s=0.3, max_samples=200)
#: Standard errors that a host's speed lies off the profile's at least, to be taken off.
_TELLS = 2.0
#: Nothing counts, but inputs are made.
_MADE = Effort(min_s=0.0, min_samples=1, max_s=0.0, timeout_s=120.0)


class PassTimes(NamedTuple):
    """Times of ranks at work together over their prices.

    Attributes:
        factors: number of ranks to mean time of a pass over its price.
        programs: of each device and program time of a call over its price, by one rank alone;
            nothing if ``counts`` has no 1.
    """

    factors: dict[int, float]
    programs: dict[DeviceName, dict[Program, float]]

    @classmethod
    def mean(cls, several: Sequence[PassTimes]) -> PassTimes:
        """Of several passes; a program counts in those that have it.

        Args:
            several: of the same devices and numbers of ranks.
        """
        factors = {n: fmean(one.factors[n] for one in several) for n in several[0].factors}
        programs: dict[DeviceName, dict[Program, list[float]]] = {}
        for one in several:
            for device, found in one.programs.items():
                for item, factor in found.items():
                    programs.setdefault(device, {}).setdefault(item, []).append(factor)
        return cls(
            factors,
            {d: {i: fmean(each) for i, each in found.items()} for d, found in programs.items()},
        )


def measure_together(
    devices: Sequence[DeviceName],
    calls: Mapping[Program, int],
    price_s: Mapping[DeviceName, Mapping[Program, float]],
    *,
    cores: Sequence[Sequence[int]],
    counts: Sequence[int],
    repeats: int = 5,
    measure_s: float = 0.25,
) -> PassTimes:
    """Time a pass by ranks at work together, over its price.

    All numbers are measured in turn, ``repeats`` times, and medians are kept, so that a drift of
    the machine's speed falls on all of them. Of each number all ranks take part, in groups of
    neighbours one after the other (8 at most), and count alike. Prices are taken at the speed that
    the host has in these turns, as far as it can be told.

    Args:
        devices: what each rank is.
        calls: programs of a pass, each with its number of calls.
        price_s: seconds of a call of each program by each device's profile.
        cores: of each rank.
        counts: ranks at work together, 1 for one alone.
        repeats: times that each number is measured.
        measure_s: how long each group of ranks is timed, in seconds.

    Raises:
        MissingDataError: a program did not run.
    """
    effort = Effort(min_s=measure_s, min_samples=2, max_s=4 * measure_s, max_samples=1 << 30)
    # By number of ranks, turn by turn: device and pass over price of each rank.
    found: dict[int, list[list[tuple[DeviceName, float]]]] = {count: [] for count in counts}
    pass_s = {
        device: sum(prices[item] * count for item, count in calls.items())
        for device, prices in price_s.items()
    }
    alone: dict[DeviceName, dict[Program, list[float]]] = {
        device: {item: [] for item in calls} for device in price_s
    }
    paces: dict[DeviceName, list[float]] = {device: [] for device in price_s}
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(device, cores=place))
            for device, place in zip(devices, cores, strict=True)
        ]
        _passes(workers, calls, _MADE)
        first = {worker.device: worker for worker in reversed(workers)}
        for _ in range(repeats):
            for device, worker in first.items():
                paces[device].append(_pace(worker, calls, price_s[device]))
            for count, turns in found.items():
                groups = [workers[k : k + count] for k in range(0, len(workers), count)]
                ratios: list[tuple[DeviceName, float]] = []
                for group in [group for group in groups if len(group) == count][:_GROUPS]:
                    for worker, took in zip(group, _passes(group, calls, effort), strict=True):
                        device = worker.device
                        whole = sum(took[item] * often for item, often in calls.items())
                        ratios.append((device, whole / pass_s[device]))
                        if count == 1:
                            for item, seconds in took.items():
                                alone[device][item].append(seconds / price_s[device][item])
                turns.append(ratios)
    pace = {device: _settled(each) for device, each in paces.items() if each}
    return PassTimes(
        {
            count: median(fmean(ratio / pace[device] for device, ratio in turn) for turn in turns)
            for count, turns in found.items()
        },
        {
            device: {item: median(each) / pace[device] for item, each in programs.items() if each}
            for device, programs in alone.items()
        },
    )


def _settled(paces: Sequence[float]) -> float:
    """Mean of several turns; 1 if that lies within their scatter."""
    mean = fmean(paces)
    error = stdev(paces) / len(paces) ** 0.5 if len(paces) > 1 else 0.0
    return mean if abs(mean - 1.0) > _TELLS * error else 1.0


def _pace(worker: Worker, calls: Mapping[Program, int], price_s: Mapping[Program, float]) -> float:
    """Time of programs by themselves, as the profile times them, over their prices by it."""
    most = sorted(calls, key=lambda item: -calls[item] * price_s[item])[:_TELLING]
    taken = priced = 0.0
    for item in most:
        found = worker.measure(item, _ALONE, keep=True)
        if found.error is not None:
            raise MissingDataError(f"ranks at work together on {worker.device}: {found.error}")
        taken += calls[item] * found.median_s
        priced += calls[item] * price_s[item]
    return taken / priced


def _passes(
    workers: Sequence[Worker], calls: Mapping[Program, int], effort: Effort
) -> list[dict[Program, float]]:
    """Seconds of a call of each program of a pass, on each of several ranks at once."""
    for worker in workers:
        worker.send_pass(tuple(calls.items()), effort, keep=True)
    answers = [worker.receive_pass(len(calls), effort) for worker in workers]
    found = []
    for worker, answer in zip(workers, answers, strict=True):
        failed = next((one.error for one in answer if one.error is not None), None)
        if failed is not None:
            raise MissingDataError(f"ranks at work together on {worker.device}: {failed}")
        found.append({item: fmean(took.times_s) for item, took in zip(calls, answer, strict=True)})
    return found
