"""What people do without a solver, as assignments of the same chain problem.

Every baseline gives all layers one variant, the first of a preference list with which it finds a
feasible assignment, and may choose the device order unless one is given; all are scored by
``evaluate``, so that a comparison sees the same costs, links and limits.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from foreplan.errors import SpecError
from foreplan.solvers._chain_path import cheapest_path
from foreplan.solvers._stage_modes import modes_of, stage_sums
from foreplan.solvers.chain_problem import ChainProblem, FloatArray
from foreplan.solvers.chain_score import (
    ChainAssignment,
    ChainStage,
    evaluate,
    make_stage,
    score_stages,
)

MAX_ORDERS = 2_000
"""Distinct device orders beyond which only orders with same-type devices adjacent are tried, and of
those, where they are more, so many: by speed, by memory, their reverses and drawn ones."""

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
    n_layers = problem.n_layers

    def sizes(order: Order) -> list[int]:
        return [(n_layers + len(order) - 1 - j) // len(order) for j in range(len(order))]

    return _best_split(problem, variants, order, sizes)


def memory_proportional_split(
    problem: ChainProblem, variants: Sequence[int], order: Sequence[int] | None = None
) -> ChainAssignment | None:
    """Give every device layers in proportion to its capacity (largest remainders, at least one).

    Arguments, answer and errors are those of `even_split`.
    """

    def sizes(order: Order) -> list[int]:
        capacity = np.minimum(problem.capacity_bytes[list(order)], 1e300)
        share = capacity / max(float(capacity.max()), 1e-300)
        exact = (problem.n_layers - len(order)) * share / max(float(share.sum()), 1e-300)
        whole = np.floor(exact).astype(int)
        missing = problem.n_layers - len(order) - int(whole.sum())
        for j in np.argsort(whole - exact, kind="stable")[:missing]:
            whole[j] += 1
        return [int(n) + 1 for n in whole]

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


def _orders(problem: ChainProblem) -> Iterator[Order]:
    """Distinct orders of all devices, or of the types if there are too many."""
    counts = [int(c) for c in problem.counts]
    n = sum(counts)
    if n == 0:
        return
    distinct = math.factorial(n) // math.prod(math.factorial(c) for c in counts)
    if distinct > MAX_ORDERS:
        for types in _type_orders(problem):
            yield tuple(k for k in types for _ in range(counts[k]))
        return

    order = [k for k in range(problem.n_types) for _ in range(counts[k])]
    while True:  # next in lexicographic order
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
    sizes: Callable[[Order], list[int]],
) -> ChainAssignment | None:
    """Best order for stage sizes that follow from it, at the first variant that fits."""
    orders = list(_orders(problem)) if order is None else [_checked(problem, order)]
    # Orders of more devices than layers share their beginnings.
    orders = list(dict.fromkeys(candidate[: problem.n_layers] for candidate in orders))
    for variant in _variants(problem, variants):

        @functools.cache  # orders share stages
        def stage(k: int, a: int, b: int, variant: int = variant) -> ChainStage:
            return make_stage(problem, k, a, b, [variant] * (b - a))

        best, best_objective = None, math.inf
        for used in orders:
            ends = np.cumsum(sizes(used)).tolist()
            cuts = zip(used, [0, *ends[:-1]], ends, strict=True)
            stages = tuple(stage(k, a, b) for k, a, b in cuts)
            score = score_stages(problem, stages)
            if score.feasible and score.objective < best_objective:
                best, best_objective = ChainAssignment(stages), score.objective
        if best is not None:
            return best
    return None


def _stage_times(problem: ChainProblem, variant: int) -> tuple[FloatArray, FloatArray]:
    """Prefill and decode seconds ``[K, L, L+1]`` of every stage at one variant; ``inf`` if not."""
    n_types, n_layers = problem.n_types, problem.n_layers
    out = []
    available = problem.available[:, :, variant]
    for quantity in ("prefill_s", "decode_s"):
        layers = np.where(available, getattr(problem, quantity)[:, :, variant], math.inf)
        table = np.full((n_types, n_layers, n_layers + 1), math.inf)
        for a in range(n_layers):
            table[:, a, a + 1 :] = np.cumsum(layers[:, a:], axis=1)
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
    cost, path = cheapest_path(stage, hop, back, by_first, counts)
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
