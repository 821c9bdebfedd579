"""Lines that crowd into few sets of a cache, against sets counted one by one."""

from __future__ import annotations

import itertools
from typing import Any

import numba
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foreplan.cost_models.programs.encoder._leaf_sets import _needed

_LINE, _WAY = 64, 4096


@numba.njit
def _called(lines: float, run: float, steps: Any, turns: Any, outer: int, way: float) -> Any:
    """Parts of the encoder are called by compiled code only."""
    return _needed(lines, run, steps, turns, outer, way)


def needed(run: int, dims: list[tuple[int, int]]) -> float:
    """Bytes of a cache for runs of bytes at (step, turns), ways of 4 KiB."""
    steps, turns = np.zeros(12), np.zeros(12)
    for number, (step, many) in enumerate(dims):
        steps[number], turns[number] = step, many
    lines = float(-(-run // _LINE) * np.prod([many for _, many in dims] or [1]))
    return float(_called(lines, float(run), steps, turns, len(dims), float(_WAY)))


def test_rows_of_a_page_share_one_set() -> None:
    # 32 x 32 images of fp32 lie 4,096 bytes apart: one line of each of 128 fills 128 ways.
    assert needed(64, [(4096, 128)]) == 127 * 4096
    # A line more between them, and each has a set of its own; two in each from 65 rows on.
    assert needed(64, [(4160, 64)]) == 64 * 64
    assert needed(64, [(4160, 128)]) == 128 * 64
    # 56 x 56 images: 12,544 bytes, 256 past a multiple of a way, so 16 of 64 sets.
    assert needed(64, [(12544, 512)]) == 31 * 4096
    assert needed(8192, []) == 8192


@given(
    run=st.integers(1, 40).map(lambda n: n * _LINE),
    dims=st.lists(
        st.tuples(st.integers(1, 300).map(lambda n: n * _LINE), st.integers(2, 64)), max_size=2
    ),
)
def test_it_is_the_mean_of_the_sets_that_are_met(run: int, dims: list[tuple[int, int]]) -> None:
    met = set()
    for places in itertools.product(*(range(many) for _, many in dims)):
        first = sum(place * step for place, (step, _) in zip(places, dims, strict=True))
        met |= {(first + at) % _WAY // _LINE for at in range(0, min(run, _WAY), _LINE)}
    lines = run // _LINE * int(np.prod([many for _, many in dims] or [1]))
    wanted = max(lines * _LINE, (lines / len(met) - 1) * _WAY)
    assert needed(run, dims) == wanted
