"""What people do without a solver, as assignments of the same chain problem.

Every baseline gives all layers one variant, the first of a preference list with which it finds a
feasible assignment, and may choose the device order unless one is given; all are scored by
``evaluate``, so that a comparison sees the same costs, links and limits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from foreplan.errors import SpecError
from foreplan.solvers._chain_path import cheapest_path
from foreplan.solvers._stage_modes import modes_of, stage_sums
from foreplan.solvers.chain_problem import ChainProblem, FloatArray, IntArray
from foreplan.solvers.chain_score import ChainAssignment, evaluate, make_stage

MAX_ORDERS = 2_000
"""Distinct device orders beyond which only orders with same-type devices adjacent are tried, and of
those, where they are more, so many: by speed, by memory, their reverses and drawn ones."""
_ROUNDING = 1e-12
"""Relative, of sums over stages in another order of terms."""

Order = tuple[int, ...]
"""Type of each device along the chain."""
Stages = list[tuple[int, int, int]]
"""(type, start, end) of each stage."""


def even_split(
    problem: ChainProblem, variants: Sequence[int], order: Sequence[int] | None = None
) -> ChainAssignment | None:
    """Give every device the same number of layers, earlier stages one more if it does not divide.

    Args:
        problem: the instance.
        variants: variants in order of preference.
        order: type of each device along the chain; default the best order of all devices.

    Returns:
        The assignment, or ``None`` if none is feasible.

    Raises:
        SpecError: an order that uses devices that are not there, or no variants.
    """

    def sizes(orders: IntArray) -> IntArray:
        n = orders.shape[1]
        each: IntArray = (problem.n_layers + n - 1 - np.arange(n)) // n
        return np.broadcast_to(each, orders.shape)

    return _best_split(problem, variants, order, sizes)


def memory_proportional_split(
    problem: ChainProblem, variants: Sequence[int], order: Sequence[int] | None = None
) -> ChainAssignment | None:
    """Give every device layers in proportion to its capacity (largest remainders, at least one).

    Arguments, answer and errors are those of `even_split`.
    """

    def sizes(orders: IntArray) -> IntArray:
        capacity = np.minimum(problem.capacity_bytes[orders], 1e300)
        share = capacity / np.maximum(capacity.max(axis=1, keepdims=True), 1e-300)
        spare = problem.n_layers - orders.shape[1]
        exact = spare * share / np.maximum(share.sum(axis=1, keepdims=True), 1e-300)
        whole = np.floor(exact).astype(np.int64)
        missing = spare - whole.sum(axis=1, keepdims=True)
        by_remainder = np.argsort(whole - exact, axis=1, kind="stable")
        more = np.arange(orders.shape[1]) < missing
        given = np.zeros_like(whole)
        np.put_along_axis(given, by_remainder, more.astype(np.int64), axis=1)
        layers: IntArray = whole + given + 1
        return layers

    return _best_split(problem, variants, order, sizes)


def min_max_split(
    problem: ChainProblem, variants: Sequence[int], order: Sequence[int] | None = None
) -> ChainAssignment | None:
    """Minimise the longest decode stage or hop, as PipeEdge does; prefill time breaks ties.

    Any device may stay unused.

    Args:
        problem: the instance.
        variants: variants in order of preference.
        order: type of each device along the chain; default any order, found by the same dynamic
            programme over used devices.

    Returns:
        The assignment, or ``None`` if none is feasible.

    Raises:
        SpecError: an order that uses devices that are not there, or no variants.
    """
    given = None if order is None else _checked(problem, order)
    for variant in _variants(problem, variants):
        stages = _min_max_stages(problem, variant, given)
        if stages is not None:
            assignment = _assignment(problem, stages, variant)
            if evaluate(problem, assignment).feasible:
                return assignment
    return None


def _variants(problem: ChainProblem, variants: Sequence[int]) -> Sequence[int]:
    if not variants or not all(0 <= v < problem.n_variants for v in variants):
        raise SpecError(
            "variants", got=tuple(variants), expected=f"some of 0..{problem.n_variants - 1}"
        )
    return variants


def _checked(problem: ChainProblem, order: Sequence[int]) -> Order:
    used = np.bincount(np.asarray(order, dtype=np.int64), minlength=problem.n_types)
    if len(used) > problem.n_types or (used > problem.counts).any() or not len(order):
        raise SpecError("order", got=tuple(order), expected="types of devices that are there")
    return tuple(order)


def _assignment(
    problem: ChainProblem, stages: Sequence[tuple[int, int, int]], variant: int
) -> ChainAssignment:
    return ChainAssignment(
        tuple(make_stage(problem, k, a, b, [variant] * (b - a)) for k, a, b in stages)
    )


def _orders(problem: ChainProblem) -> IntArray:
    """``[N, devices]`` distinct orders of all devices, or of the types if there are too many."""
    counts = [int(c) for c in problem.counts]
    n = sum(counts)
    if n == 0:
        return np.empty((0, 0), dtype=np.int64)
    distinct = math.factorial(n) // math.prod(math.factorial(c) for c in counts)
    if distinct <= MAX_ORDERS:
        return np.array(list(_device_orders(counts)), dtype=np.int64)
    types = np.array(list(_type_orders(problem)), dtype=np.int64)
    return np.repeat(types.ravel(), problem.counts[types].ravel()).reshape(len(types), n)


def _device_orders(counts: Sequence[int]) -> Iterator[Order]:
    """All distinct orders of the devices, in lexicographic order."""
    order = [k for k, count in enumerate(counts) for _ in range(count)]
    n = len(order)
    while True:
        yield tuple(order)
        rise = next((j for j in range(n - 2, -1, -1) if order[j] < order[j + 1]), None)
        if rise is None:
            return
        above = next(j for j in range(n - 1, rise, -1) if order[j] > order[rise])
        order[rise], order[above] = order[above], order[rise]
        order[rise + 1 :] = reversed(order[rise + 1 :])


def _type_orders(problem: ChainProblem) -> Iterator[Order]:
    """Orders of the types, at most `MAX_ORDERS`."""
    types = tuple(range(problem.n_types))
    if math.factorial(len(types)) <= MAX_ORDERS:
        yield from itertools.permutations(types)
        return
    seconds = np.where(problem.available, problem.decode_s, 0.0).sum(axis=(1, 2))
    known: dict[Order, None] = {}
    for key in (np.arange(len(types)), seconds, problem.capacity_bytes):
        order = tuple(np.argsort(key, kind="stable").tolist())
        known |= {order: None, order[::-1]: None}
    random = np.random.default_rng(0)
    while len(known) < MAX_ORDERS:
        known[tuple(random.permutation(len(types)).tolist())] = None
    yield from known


def _best_split(
    problem: ChainProblem,
    variants: Sequence[int],
    order: Sequence[int] | None,
    sizes: Callable[[IntArray], IntArray],
) -> ChainAssignment | None:
    """Best order for stage sizes that follow from it, at the first variant that fits."""
    orders = _orders(problem) if order is None else np.array([_checked(problem, order)])
    if orders.shape[1] > problem.n_layers:  # which share their beginnings
        beginnings = orders[:, : problem.n_layers]
        _, firsts = np.unique(beginnings, axis=0, return_index=True)
        orders = beginnings[np.sort(firsts)]
    known = _variants(problem, variants)
    if not len(orders):
        return None
    each = sizes(orders)
    for variant in known:
        latency = _latencies(problem, variant, orders, each)
        # Sums of another order of terms: what may be the least is scored as every chain is.
        near = np.flatnonzero(latency <= latency.min() * (1 + _ROUNDING))
        best, best_objective = None, math.inf
        for row in near[np.isfinite(latency[near])].tolist():
            ends = np.cumsum(each[row]).tolist()
            cuts = zip(orders[row].tolist(), [0, *ends[:-1]], ends, strict=True)
            assignment = _assignment(problem, list(cuts), variant)
            score = evaluate(problem, assignment)
            if score.feasible and score.objective < best_objective:
                best, best_objective = assignment, score.objective
        if best is not None:
            return best
    return None


def _latencies(
    problem: ChainProblem, variant: int, orders: IntArray, sizes: IntArray
) -> FloatArray:
    """``[N]`` latency of every order's chain at one variant; ``inf`` where it does not fit.

    Args:
        problem: the instance.
        variant: of all layers.
        orders: ``[N, S]`` types along each chain.
        sizes: ``[N, S]`` layers of its stages.
    """
    ends = np.cumsum(sizes, axis=1)
    chain, hop = (orders, ends - sizes, ends), (orders[:, :-1], orders[:, 1:])
    # A single stage has no return hop.
    back = problem.link_return_decode_s[orders[:, -1:], orders[:, :1]][:, : orders.shape[1] - 1]
    prefill, decode = _stage_times(problem, variant)
    once = np.concatenate((prefill[chain], problem.link_prefill_s[hop]), axis=1)
    each = np.concatenate((decode[chain], problem.link_decode_s[hop], back), axis=1)
    first, turn = once.sum(axis=1), each.sum(axis=1)
    possible = np.isfinite(first) & np.isfinite(turn)
    with np.errstate(invalid="ignore"):  # 0 * inf
        first += (problem.prefill_microbatches - 1) * once.max(axis=1)
        turn = np.maximum(turn, problem.decode_microbatches * each.max(axis=1))
        return np.where(possible, first + (problem.new_tokens - 1) * turn, math.inf)


def _stage_times(problem: ChainProblem, variant: int) -> tuple[FloatArray, FloatArray]:
    """Prefill and decode seconds ``[K, L, L+1]`` of every stage at one variant; ``inf`` if not."""
    out = []
    available = problem.available[:, :, variant]
    for quantity in ("prefill_s", "decode_s"):
        layers = np.where(available, getattr(problem, quantity)[:, :, variant], math.inf)
        table = stage_sums(layers)
        table[:, 0] += getattr(problem, f"first_{quantity}")[:, None]
        table[:, :, -1] += getattr(problem, f"last_{quantity}")[:, None]
        out.append(table)
    modes = modes_of(problem)
    held = problem.memory_bytes[modes.of, :, variant]
    layers = np.where(modes.allowed[:, :, variant], held, math.inf)
    short = np.where(stage_sums(layers) <= modes.room, 0.0, 1.0)
    fits = (modes.least(short) == 0.0) & np.isfinite(out[0] + out[1])
    return np.where(fits, out[0], math.inf), np.where(fits, out[1], math.inf)


def _min_max_stages(problem: ChainProblem, variant: int, order: Order | None) -> Stages | None:
    """Least longest decode time by bisection over the values it can take."""
    prefill, decode = _stage_times(problem, variant)
    links = (problem.link_decode_s, problem.link_return_decode_s)
    values = np.unique(np.concatenate([x[np.isfinite(x)] for x in (decode, *links)]))
    low, high = 0, len(values)
    best = None
    while low < high:
        middle = (low + high) // 2
        found = _cheapest(problem, prefill, decode, float(values[middle]), order)
        if found is None:
            low = middle + 1
        else:
            best, high = found, middle
    return best


def _cheapest(
    problem: ChainProblem,
    prefill: FloatArray,
    decode: FloatArray,
    cap: float,
    order: Order | None,
) -> Stages | None:
    """Chain with the least sum of prefill times whose decode times and hops stay below a cap."""
    stage = np.where(decode <= cap, prefill, math.inf)
    hop = np.where(problem.link_decode_s <= cap, problem.link_prefill_s, math.inf)
    back = np.where(problem.link_return_decode_s <= cap, 0.0, math.inf)
    if order is not None:
        return _cheapest_in_order(order, stage, hop, back)
    counts = np.minimum(problem.counts, problem.n_layers)
    by_first = bool(np.any(back != back[:, :1]))
    cost, path, _ = cheapest_path(stage, hop, back, by_first, counts)
    if cost == math.inf or (np.bincount(path[:, 0], minlength=problem.n_types) > counts).any():
        return None
    return [(k, a, b) for k, a, b in path.tolist()]


def _cheapest_in_order(
    order: Order, stage: FloatArray, hop: FloatArray, back: FloatArray
) -> Stages | None:
    """The same for a given order, of which any device may be skipped."""
    n_layers = stage.shape[1]
    best: tuple[float, Stages] = (math.inf, [])
    for opener in range(len(order)):
        # By boundary and position in the order of the last device used; the opener is fixed.
        nodes: list[dict[int, tuple[float, Stages]]] = [{} for _ in range(n_layers + 1)]
        nodes[0][opener - 1] = (0.0, [])
        for a in range(n_layers):
            for at, (cost, stages) in nodes[a].items():
                for j in range(at + 1, len(order) if a else opener + 1):
                    k = order[j]
                    step = hop[order[at], k] if a else 0.0
                    for b in range(a + 1, n_layers + 1):
                        value = cost + float(step + stage[k, a, b])
                        if b == n_layers and a:
                            value += float(back[k, order[opener]])
                        if value < nodes[b].get(j, (math.inf,))[0]:
                            nodes[b][j] = (value, [*stages, (k, a, b)])
        best = min([best, *nodes[n_layers].values()], key=lambda label: label[0])
    return best[1] or None
