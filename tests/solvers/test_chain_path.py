"""The dynamic programme over nodes against every chain there is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.solvers import _chain_path
from foreplan.solvers._chain_devices import counted_devices
from foreplan.solvers._chain_path import cheapest_path, completion_costs, through_costs
from foreplan.solvers.chain_problem import FloatArray, IntArray

Chain = tuple[tuple[int, int, int], ...]


def every_chain(counts: IntArray, layers: int) -> Iterator[Chain]:
    """All rows of (type, start, end) that the devices allow."""
    for size in range(1, layers + 1):
        for cuts in itertools.combinations(range(1, layers), size - 1):
            ends = (*cuts, layers)
            for types in itertools.product(range(len(counts)), repeat=size):
                if (np.bincount(types, minlength=len(counts)) <= counts).all():
                    yield tuple(zip(types, (0, *cuts), ends, strict=True))


def cost_of(chain: Chain, arc: FloatArray, hop: FloatArray, back: FloatArray) -> float:
    """Of a whole chain."""
    total = sum(float(arc[stage]) for stage in chain)
    total += sum(float(hop[a[0], b[0]]) for a, b in itertools.pairwise(chain))
    return total + (float(back[chain[-1][0], chain[0][0]]) if len(chain) > 1 else 0.0)


@st.composite
def instances(draw: st.DrawFn) -> tuple[FloatArray, FloatArray, FloatArray, bool, IntArray]:
    """Costs in whole numbers, so that sums are exact and many chains cost the same."""
    types, layers = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    counts = np.minimum(rng.integers(0, 4, types), layers)

    def costs(*shape: int, most: int) -> FloatArray:
        found = rng.integers(0, most, shape).astype(float)
        return np.where(rng.random(shape) < 0.15, math.inf, found)

    arc = costs(types, layers, layers + 1, most=6)
    arc[:, np.arange(layers + 1)[None, :] <= np.arange(layers)[:, None]] = math.inf
    by_first = draw(st.booleans())
    back = costs(types, types, most=4)
    if not by_first:
        back = np.repeat(back[:, :1], types, axis=1)
    return arc, costs(types, types, most=3), back, by_first, counts


@given(instances())
def test_nothing_is_cheaper_than_the_cheapest_path(
    instance: tuple[FloatArray, FloatArray, FloatArray, bool, IntArray],
) -> None:
    arc, hop, back, by_first, counts = instance
    cost, path, _ = cheapest_path(arc, hop, back, by_first, counts)
    chains = {c: cost_of(c, arc, hop, back) for c in every_chain(counts, arc.shape[1])}
    assert cost == min(chains.values(), default=math.inf)
    if cost == math.inf:
        assert len(path) == 0
        return
    best = [chain for chain, worth in chains.items() if worth == cost]
    taken = tuple(map(tuple, path.tolist()))
    assert taken in best
    assert taken[0][0] == min(chain[0][0] for chain in best)
    devices = counted_devices(counts, every=True)
    used, stride = devices.used, devices.stride
    node = completion_costs(arc, hop, back, by_first, used, stride, counts)
    through = through_costs(arc, hop, by_first, used, stride, node)
    for stage in np.ndindex(arc.shape):
        within = [worth for chain, worth in chains.items() if stage in chain]
        if arc[stage] < math.inf:
            assert through[stage] + arc[stage] == min(within, default=math.inf)


@given(instances(), st.booleans())
def test_counting_few_types_changes_no_path(
    instance: tuple[FloatArray, FloatArray, FloatArray, bool, IntArray], whole: bool
) -> None:
    arc, hop, back, by_first, counts = instance
    if not whole:  # few chains cost the same, and sums round
        arc, hop = arc * math.pi / 7, hop * math.e / 7
    cost, path, _ = cheapest_path(arc, hop, back, by_first, counts)
    every = counted_devices(counts, every=True)
    same, other = _chain_path._cheapest(arc, hop, back, by_first, every.used, every.stride, counts)
    assert cost == same
    assert path.tolist() == other.tolist()


@given(instances())
def test_prices_bound_what_cannot_be_counted(
    instance: tuple[FloatArray, FloatArray, FloatArray, bool, IntArray],
) -> None:
    arc, hop, back, by_first, counts = instance
    best, _, _ = cheapest_path(arc, hop, back, by_first, counts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_chain_path, "MOST_NODES", 0)
        bound, path, _ = cheapest_path(arc, hop, back, by_first, counts)
    assert bound <= best + 1e-9
    if len(path) and (np.bincount(path[:, 0], minlength=len(counts)) <= counts).all():
        chain = tuple(map(tuple, path.tolist()))
        assert cost_of(chain, arc, hop, back) >= best


@given(instances())
def test_completions_follow_from_one_another(
    instance: tuple[FloatArray, FloatArray, FloatArray, bool, IntArray],
) -> None:
    arc, hop, back, by_first, counts = instance
    devices = counted_devices(counts, every=True)
    used, stride = devices.used, devices.stride
    node = completion_costs(arc, hop, back, by_first, used, stride, counts)
    layers = arc.shape[1]
    for f, u, k, i in np.ndindex(node.shape):
        there = used[u, k] > 0 and 0 < used[u].sum() <= i and (not by_first or used[u, f] > 0)
        if not there:
            assert node[f, u, k, i] == math.inf
        elif i == layers:
            assert node[f, u, k, i] == back[k, f]
        else:
            steps = [
                hop[k, j] + arc[j, i, b] + node[f, u + stride[j], j, b]
                for j in range(len(counts)) if used[u, j] < counts[j]
                for b in range(i + 1, layers + 1)
            ]  # fmt: skip
            assert node[f, u, k, i] == min(steps, default=math.inf)
