"""How long a processor waits for operands, by what a pass uses between two uses of them.

Rates of processors were timed on weights that no cache held, behind other operators. In a pass
that is run again and again a weight was last used a pass ago, and so were the code and the tables
of the library's call: all that the pass uses has gone through the caches since, its *working set*.
Where the last-level cache holds that, they take `_NEAR` of their time; where it is far larger, all
of it; in between it grows with the logarithm of the working set over the cache. Arithmetic and
activations, which were just written, take what they take (`rate_law.waiting`).

A device that was profiled says how fast it reads again what it went through
(`Device.reread_bandwidth`): a weight then takes the share that this is of memory's time. On a Xeon
whose virtual machine names 480 MiB of cache the reads slow down behind 64, and are no more than 1.7
times as fast before (`measured`; docs/results/end_to_end.md).

Where it does not say, three numbers do, `fitted` (`reuse_fit`) to operators timed behind up to 4
caches of other data on one core of an EPYC (datasets/measured/epyc_reuse.json.xz); other processors
are assumed to wait alike, each by its own rates and its own cache.

A small pass never leaves caches that are near a core: then its weights, code and tables wait `_HOT`
of even that. Where rereads were seen, near is what reads half as fast as the fastest or faster (all
of an EPYC's last level, a Xeon's second level alone), and a tenth of it holds a pass, as it does
maps. Else it is a core's share of the second level, as the device names it; of a device of neither
figure no pass is near. `_HOT` is `fitted` to passes of tiny networks
(``tests/benchmarks/small_networks.py``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.lowering.graph_step import Step
from foreplan.cost_models.lowering.recurrent_parts import is_recurrent
from foreplan.cost_models.rates.loops import looped_steps
from foreplan.cost_models.rates.operator_rates import code_kind, family, weight_of
from foreplan.cost_models.rates.rate_law import WAITING, Waits
from foreplan.datasets.device import Device
from foreplan.datasets.dtypes import DTYPE_BYTES
from foreplan.datasets.program import Program

#: Share of its time that is left where the cache holds everything.
_NEAR = 0.17
#: Working sets over the cache up to which it does, and from which on nothing is left in it.
_HELD, _LOST = 0.34, 1.67
#: The same of maps and norms, whose rates were timed behind about half a cache (`measured`: eight
#: kinds at four sizes behind 64 KiB to 64 MiB, of which a call of a few us takes 0.38-0.46 of its
#: rate behind 1 MiB, 0.45-0.6 behind 4 and 0.7-1.5 behind 16; the same core).
_WIDE = (0.42, 0.1, 0.45)
#: Share that is left of either where near caches hold the whole pass.
_HOT = 0.4
#: Of the fastest reread, what those from a near cache reach; assumed.
_NEAR_READS = 0.5
#: Of memory's reads that those are faster which still come from a cache. Assumed: reads from memory
#: of one core differ by a tenth.
_FASTER = 1.25
#: Tensors of each parameter that a step with an update goes through: weight, gradient, two moments.
_UPDATED = 4


def pass_waits(steps: Sequence[Step], device: Device) -> Waits:
    """What a processor's caches leave of the waiting of a pass that is run again and again.

    Weights were last used a pass ago. Code was, where its kind is called once; else as much has
    gone through the caches since as the pass moves from one such call to the next.

    Args:
        steps: of the pass, from `graph_programs`.
        device: a processor.
    """
    whole = working_set(steps)
    hot = _HOT + (1.0 - _HOT) * spilled_share(device, whole)
    weight = hot * waiting_share(device, whole)
    moved, calls = 0.0, dict[str, list[tuple[float, float]]]()
    for work in (step.work for step in steps if isinstance(step.work, Program)):
        if family(work) in WAITING:
            calls.setdefault(code_kind(work), []).append((moved, moved + work.bytes))
        moved += work.bytes
    code = {}
    for kind, spans in calls.items():
        # The first call comes behind the last one of the pass before.
        ends = [spans[-1][1] - moved, *(end for _, end in spans[:-1])]
        gaps = [start - end for (start, _), end in zip(spans, ends, strict=True)]
        shares = [waiting_share(device, min(gap, whole), kind) for gap in gaps]
        code[kind] = hot * sum(shares) / len(shares)
    return Waits(weight, code, _of_loops(steps, device))


def near_loops(steps: Sequence[Step], device: Device) -> NDArray[np.bool_]:
    """Which steps of a pass are of loops that near caches hold (N,); see `looped_steps`."""
    held = _near_bytes(device) if device.kind == "cpu" else None
    return looped_steps(steps, held or 0.0)


def _of_loops(steps: Sequence[Step], device: Device) -> dict[Program, float]:
    """What is left of the waiting for code of programs that loops call, most of the time."""
    calls, within = Counter[Program](), Counter[Program]()
    for step, looped in zip(steps, near_loops(steps, device), strict=True):
        if isinstance(step.work, Program) and family(step.work) in WAITING:
            calls[step.work] += 1
            within[step.work] += int(looped)
    return {
        work: _HOT * waiting_share(device, 0.0, code_kind(work))
        for work, count in calls.items()
        if 2 * within[work] > count
    }


def waiting_share(device: Device, used_bytes: float, kind: str = "") -> float:
    """Share of the time of what was last used a pass ago, from `_NEAR` to 1.

    Args:
        device: a processor; 1 on others and where its cache is not known.
        used_bytes: between two uses of it.
        kind: as `code_kind`; ``wide`` are maps and norms, else products and what they read.
    """
    if device.kind != "cpu":
        return 1.0
    if device.reread_bandwidth and kind != "wide":
        return _reread_share(device, used_bytes)
    cache = _cache(device)
    if not cache:
        return 1.0
    law = _WIDE if kind == "wide" else (_NEAR, _HELD, _LOST)
    return share_of(used_bytes / cache, *law)


def spilled_share(device: Device, used_bytes: float) -> float:
    """How far a pass is from near caches: from 0, where they hold it, to 1.

    Args:
        device: a processor; 1 on others, and where its near caches are not known.
        used_bytes: working set of the pass.
    """
    held = _near_bytes(device) if device.kind == "cpu" else None
    return share_of(used_bytes / held, 0.0, 1.0, _WIDE[2] / _WIDE[1]) if held else 1.0


def _near_bytes(device: Device) -> float | None:
    """Bytes of a pass that near caches hold: by where rereads slow down, or as they are named."""
    if seen := device.reread_bandwidth:
        rates = [rate for _, rate in seen]
        fastest = rates.index(max(rates))
        slow = (size for size, rate in seen[fastest:] if rate < _NEAR_READS * rates[fastest])
        size = next(slow, None)
        return _WIDE[1] * size if size else None
    return device.l2_bytes / (device.units or 1) if device.l2_bytes else None


def _reread_share(device: Device, used_bytes: float) -> float:
    """Time of reading again behind so many bytes over that of reading from memory, up to 1."""
    sizes, rates = np.log(np.array(device.reread_bandwidth, dtype=np.float64)).T
    rates = np.maximum.accumulate(rates[::-1])[::-1]  # more bytes are never nearer
    return float(np.exp(rates[-1] - np.interp(math.log(max(used_bytes, 1.0)), sizes, rates)))


def _cache(device: Device) -> float | None:
    """Bytes that the last-level cache holds for the device: as it was seen to, or as it is named.

    A worker of more memory bandwidth than its cache has none to speak of: its least size counts.
    """
    seen = device.reread_bandwidth
    if not seen:
        return device.l3_bytes or device.l2_bytes
    return max(size for size, rate in seen if rate >= _FASTER * seen[-1][1] or size == seen[0][0])


def share_of(filled: float, near: float, held: float, lost: float) -> float:
    """The law: `near` up to `held`, 1 from `lost` on, between them by the logarithm.

    Args:
        filled: bytes between two uses over those of the cache.
        near: share of the time where the cache holds everything.
        held: up to where it does.
        lost: from where on it holds nothing.
    """
    if filled <= held:
        return near
    gone = math.log(filled / held) / math.log(lost / held)
    return near + (1.0 - near) * min(1.0, gone)


def working_set(steps: Sequence[Step]) -> float:
    """Bytes that a pass uses: what comes between two uses of a weight.

    An inference reads its weights, and its activations take each other's place. A training step
    keeps what every operator has written for the backward pass, and its update goes through
    weights, gradients and both moments.

    Args:
        steps: of the pass, from `graph_programs`.
    """
    forward = [
        step.work for step in steps
        if step.part in ("forward", "loss") and isinstance(step.work, Program)
    ]  # fmt: skip
    weights = sum(_weight(work) for work in forward)
    activations = [work.bytes - _weight(work) for work in forward]
    if all(step.part == "forward" for step in steps):
        return weights + max(activations, default=0.0)
    updated = sum(
        work.dims["parameters"] * DTYPE_BYTES[work.variant.compute]
        for work in (step.work for step in steps)
        if isinstance(work, Program) and work.op == "adamw"
    )
    # Each is written by one operator and read by the next: half of what moves.
    return _UPDATED * max(weights, updated) + sum(activations) / 2


def _weight(work: Program) -> float:
    """Bytes that come back in the next pass alone; of a recurrent layer all, mostly weights."""
    return work.bytes if is_recurrent(work) else weight_of(work)
