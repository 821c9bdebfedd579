"""`usual_host_s`: what a usual host takes, at least, to issue each rank's part of a schedule.

For plans on GPUs whose host nobody profiled, whose prices are the devices' own. Programs of a
schedule stand for ATen calls; an action is a part of a pass (`gpu_host`). Views, tensors beside
weights and the code of a plan's runtime are not among its works, so that a host takes no less: in
the runs that a host is known to have decided, several times as long (docs/results/precision.md,
docs/results/bubbles.md). Enough to say that a host may decide, not to be a price.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.costs import HostLaunch, Segment, Work
from foreplan.cost_models.rates.gpu_host import HIGH, LOW, SECONDS, HostAsked
from foreplan.cost_models.schedule import Schedule
from foreplan.datasets.program import Program

#: Ends of a training program's name that say that it is part of a backward pass.
_BACKWARD = ("_backward", "_weight_gradient")
#: Programs whose gradients are a tensor, at least.
_WEIGHTS = ("linear", "embedding", "conv")
_LONG = ("conv", "batch_norm")


def usual_host_s(schedule: Schedule) -> NDArray[np.float64]:
    """Seconds by rank: mean, low and high (R, 3).

    Args:
        schedule: of training steps whose operators are issued one by one.
    """
    each = np.array([_issue_s(work) for work in schedule.works])
    ranks = np.bincount(schedule.rank, each[schedule.work], schedule.ranks)
    return np.outer(ranks, [1.0, LOW, HIGH])


def _issue_s(work: Work) -> float:
    calls = long = tensors = updated = 0
    backward = False
    for program, count in _programs(work):
        if program.op == "optimizer_step":
            updated += count * program.dims["tensors"]
            continue
        calls += count
        long += count * program.op.startswith(_LONG)
        if program.op.endswith(_BACKWARD):
            backward = True
            tensors += count * program.op.startswith(_WEIGHTS)
    part = "backward" if backward else "forward"
    calls += _launches(work)
    found = SECONDS[part].of(HostAsked(calls, long, 0, tensors)) if calls else 0.0
    if updated:
        found += SECONDS["optimizer"].of(HostAsked(0, 0, 0, updated))
    return found


def _programs(work: Work) -> Iterator[tuple[Program, int]]:
    if isinstance(work, Program):
        yield work, 1
    elif isinstance(work, Segment):
        for part, count in work.parts:
            for program, times in _programs(part):
                yield program, count * times


def _launches(work: Work) -> int:
    """Calls that stand for no program."""
    if isinstance(work, Segment):
        return sum(count * _launches(part) for part, count in work.parts)
    return work.calls if isinstance(work, HostLaunch) else 0
