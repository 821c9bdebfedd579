"""Lower bounds on a chain problem that need no search: layers shared as if they were a fluid.

Devices of a group take any share of the layers at any mix of variants; each kind's devices share
their load evenly; a layer costs what the kind's cheapest one costs at that variant. With ``y_kv``
layers of kind ``k`` at variant ``v`` and ``c_k`` devices, a linear programme (`fluid_latency_s`)::

    min  sum P_kv y_kv + (Mp - 1) p + (n - 1) r
    c_k p >= sum_v P_kv y_kv,   c_k d >= sum_v D_kv y_kv,   r >= m d,   r >= sum D_kv y_kv
    sum_v M_kv y_kv <= c_k (capacity_k - once_k),   sum y = L,   sum cost2 y <= max_cost2

(edges of first and last stage at their least are added to both sums; ``p`` and ``d`` are at least
what the stage takes that has the most layers: ``ceil(L / sum c)``, for a stage has whole ones).
Where kinds are groups of the same devices, ``s_k`` of them each and ``N`` in all, no way to group
them is below the programme with the rows of these kinds summed (`Pool`)::

    N p >= sum s_k P_kv y_kv,   N d >= sum s_k D_kv y_kv
    sum s_k M_kv y_kv / (capacity_k - once_k) <= N

`quick_latency_s` bounds that
from below in closed form, for many groups at once: the cheapest variant everywhere. Limits on times
are limits on the two terms: ``sum P y + (Mp - 1) p <= first`` and ``r <= step``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreplan.solvers._linear import least
from foreplan.solvers.chain_limits import TimeLimits
from foreplan.solvers.chain_problem import ChainProblem, FloatArray, IntArray

#: No limit.
_FREE = TimeLimits()
#: Relative slack of a limit: what the linear programme's solver may be off.
_SLACK = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Devices that kinds are groups of.

    Attributes:
        sizes: ``[K]`` devices that a group of each kind takes, 0 of kinds that are of others.
        devices: how many there are.
    """

    sizes: IntArray
    devices: int


def quick_latency_s(
    problem: ChainProblem, groups: IntArray, limits: TimeLimits = _FREE
) -> FloatArray:
    """Latency that no assignment over a group is below.

    Args:
        problem: the instance; its own counts are not used.
        groups: ``[G, K]`` devices of each kind.
        limits: on times; assignments beyond them do not count.

    Returns:
        ``[G]`` seconds; ``inf`` where the least memory does not fit, or a limit cannot be met.
    """
    there = groups > 0
    alone = {
        phase: problem.n_layers * getattr(problem, f"{phase}_s").min(axis=(1, 2))
        for phase in ("prefill", "decode")
    }
    need = _least(problem.n_layers * problem.memory_bytes.min(axis=(1, 2)), there)
    need += _least(problem.first_memory_bytes, there) + _least(problem.last_memory_bytes, there)
    room = groups @ _room(problem)
    latency = np.where(need <= room * (1 + 1e-9), 0.0, np.inf)
    for phase, whole in alone.items():
        rate = np.where(np.isfinite(whole), 1.0 / np.maximum(whole, 1e-300), 0.0)
        slowest = 1.0 / np.maximum(groups @ rate, 1e-300)
        slowest = np.maximum(slowest, _longest(problem, phase, there, groups.sum(axis=1)))
        through = _least(whole, there) + _edges(problem, phase, there)
        term = _term(problem, phase, through, slowest)
        late = (
            term > limits.first_s * (1 + _SLACK)
            if phase == "prefill"
            else term > limits.step_s * (problem.new_tokens - 1) * (1 + _SLACK)
        )
        latency += np.where(late, np.inf, term)
    return latency


def fluid_latency_s(
    problem: ChainProblem,
    limits: TimeLimits = _FREE,
    *,
    counts: IntArray | None = None,
    pools: Sequence[Pool] | None = None,
) -> float:
    """Latency that no assignment of the problem's devices is below; ``inf`` if none can exist.

    Args:
        problem: the instance.
        limits: on times; assignments beyond them do not count.
        counts: ``[K]`` devices of each kind, instead of the problem's.
        pools: instead of these counts, in whatever way the devices are grouped; each kind with a
            count is in one of them.
    """
    counts = problem.counts if counts is None else counts
    if pools is None:
        ones = np.eye(len(counts), dtype=np.int64)
        pools = [Pool(ones[k], int(count)) for k, count in enumerate(counts) if count]
        groups = int(counts.sum())
    else:
        groups = sum(pool.devices // int(pool.sizes[pool.sizes > 0].min()) for pool in pools)
    rooms = _room(problem)
    lightest = np.where(problem.available, problem.memory_bytes, np.inf).min(axis=1)
    # Stages hold whole layers: no part of one that no device of the kind has room for.
    fits = lightest <= (rooms * (1 + 1e-9))[:, None]
    usable = problem.available.any(axis=1) & fits & (counts > 0)[:, None]
    kinds, variants = np.nonzero(usable)
    if not len(kinds):
        return math.inf
    there = (counts > 0)[None, :]
    prefill, decode, memory = (
        np.where(problem.available, table, np.inf).min(axis=1)[kinds, variants]
        for table in (problem.prefill_s, problem.decode_s, problem.memory_bytes)
    )
    edges = [float(_edges(problem, phase, there)[0]) for phase in ("prefill", "decode")]
    if not math.isfinite(sum(edges)):
        return math.inf
    unit = float(prefill.max() + decode.max()) * problem.n_layers or 1.0  # rows of about 1
    columns, steps = len(kinds), problem.new_tokens - 1
    longest = [
        float(_longest(problem, phase, there, np.array([groups]))[0]) / unit
        for phase in ("prefill", "decode")
    ]
    # y, then p, d, r.
    target = np.concatenate(
        (prefill / unit, [problem.prefill_microbatches - 1.0, 0.0, float(steps)])
    )
    rows, ends = [], []

    def row(of_y: FloatArray, p: float, d: float, r: float, limit: float) -> None:
        rows.append(np.concatenate((of_y, [p, d, r])))
        ends.append(limit)

    for pool in pools:
        share = pool.sizes[kinds].astype(float)
        row(share * prefill / unit, -float(pool.devices), 0.0, 0.0, 0.0)
        row(share * decode / unit, 0.0, -float(pool.devices), 0.0, 0.0)
        filled = share * memory / np.maximum(rooms[kinds], 1e-300)
        if filled.any():
            row(filled, 0.0, 0.0, 0.0, float(pool.devices) * (1 + 1e-9))
    row(np.zeros(columns), 0.0, float(problem.decode_microbatches), -1.0, 0.0)
    row(decode / unit, 0.0, 0.0, -1.0, -edges[1] / unit)
    if limits.first_s < math.inf:
        room = (limits.first_s * (1 + _SLACK) - edges[0]) / unit
        row(prefill / unit, problem.prefill_microbatches - 1.0, 0.0, 0.0, room)
    if limits.step_s < math.inf and steps:
        row(np.zeros(columns), 0.0, 0.0, 1.0, limits.step_s * (1 + _SLACK) / unit)
    if problem.max_cost2 is not None:
        cost = problem.cost2.min(axis=0)[variants]
        scale = float(np.abs(cost).max()) or 1.0
        row(cost / scale, 0.0, 0.0, 0.0, problem.cost2_limit / scale)
    rows.append(np.concatenate((np.ones(columns), np.zeros(3))))
    whole = float(problem.n_layers)
    found = least(
        target,
        np.array(rows),
        np.array([-np.inf] * len(ends) + [whole]),
        np.array([*ends, whole]),
        np.concatenate((np.zeros(columns), longest, [0.0])),
        np.full(len(target), np.inf),
        presolve=False,
    )
    if found is None:
        return 0.0
    return max(0.0, found.objective * unit * (1 - 1e-7) + edges[0])


def _room(problem: ChainProblem) -> FloatArray:
    """``[K]`` bytes for layers, beside the least that any stage needs once."""
    least = problem.workspace_bytes.min(axis=(2, 3))
    for k, available in enumerate(problem.available):
        present = np.zeros(least.shape[1], dtype=bool)
        present[problem.needs[available]] = True
        least[k, ~present] = np.inf if present.any() else 0.0
    once = problem.fixed_memory_bytes + least.min(axis=1)
    room: FloatArray = np.maximum(problem.capacity_limit_bytes - once, 0.0)
    return room


def _least(of_kind: FloatArray, there: object) -> FloatArray:
    """``[G]`` the least over the kinds of each group."""
    found: FloatArray = np.where(there, of_kind, np.inf).min(axis=1)  # type: ignore[call-overload]
    return found


def _longest(problem: ChainProblem, phase: str, there: object, groups: IntArray) -> FloatArray:
    """``[G]`` the least that a stage with the most layers takes: of so many stages at most."""
    layer = _least(getattr(problem, f"{phase}_s").min(axis=(1, 2)), there)
    layer = np.where(np.isfinite(layer), layer, 0.0)  # else the time through all is endless too
    fewest: FloatArray = np.ceil(problem.n_layers / np.maximum(groups, 1))
    found: FloatArray = layer * fewest
    return found


def _edges(problem: ChainProblem, phase: str, there: object) -> FloatArray:
    first, last = getattr(problem, f"first_{phase}_s"), getattr(problem, f"last_{phase}_s")
    return _least(first, there) + _least(last, there)


def _term(
    problem: ChainProblem, phase: str, through: FloatArray, slowest: FloatArray
) -> FloatArray:
    """A phase's share of the law, from the time through all stages and of the slowest one."""
    if phase == "prefill":
        return through + (problem.prefill_microbatches - 1) * slowest
    if problem.new_tokens == 1:
        return np.zeros_like(through)
    return (problem.new_tokens - 1) * np.maximum(through, problem.decode_microbatches * slowest)
