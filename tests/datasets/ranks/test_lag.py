"""The wait for the slowest: never negative, nothing without spread, more with more of it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from foreplan.datasets.ranks.lag import lag

TIMES = arrays(
    float,
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 6)),
    elements=st.floats(1e-4, 1.0),
)


@given(TIMES)
def test_nobody_waits_less_than_nothing(seconds):
    groups, ranks, times = seconds.shape
    assert 0.0 <= lag(seconds) <= ranks * groups * times
    assert lag(seconds[:, :1]) == 0.0, "one rank waits for nobody"
    alike = np.repeat(seconds[:, :1], ranks, axis=1)
    assert lag(alike) == pytest.approx(0.0, abs=1e-12), "nor do ranks that take equally long"


@given(TIMES, st.floats(0.0, 1.0))
def test_the_wait_grows_with_the_spread(seconds, share):
    # What each rank takes more or less than its group does at that time, a part of it.
    middle = seconds.mean(axis=1, keepdims=True)
    narrower = middle + share * (seconds - middle)
    assert lag(narrower) == pytest.approx(share * lag(seconds), abs=1e-9)


@given(TIMES, st.floats(0.1, 10.0))
def test_the_unit_of_time_does_not_matter(seconds, unit):
    assert lag(unit * seconds) == pytest.approx(lag(seconds), abs=1e-9)


@given(arrays(float, (1, 8, 5), elements=st.floats(1e-4, 1.0)))
def test_more_ranks_wait_longer(seconds):
    waits = [lag(seconds.reshape(8 // ranks, ranks, 5)) for ranks in (1, 2, 4, 8)]
    assert all(fewer <= more + 1e-12 for fewer, more in itertools.pairwise(waits))


def test_two_speeds_by_hand():
    # Pairs of cores that take 1 or 1.5, each half of the time: (1, 1), (1, 1.5), (1.5, 1) and (1.5,
    # 1.5) last 1, 1.5, 1.5 and 1.5, in the mean 1.375 where a core takes 1.25.
    seconds = [[[1.0, 1.0, 1.5, 1.5], [1.0, 1.5, 1.0, 1.5]]]
    assert lag(seconds) == pytest.approx(0.1)
