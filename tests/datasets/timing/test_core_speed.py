"""How steadily cores run."""

import os

import numpy as np
import pytest

from foreplan.datasets.timing.core_speed import CoreSpeeds, core_speeds


def test_each_core_is_timed_in_each_window():
    mine = os.sched_getaffinity(0)
    cores = sorted(mine)[:2]
    found = core_speeds(cores, windows=3, window_s=0.002)
    assert found.cores == tuple(cores)
    assert found.alone_s.shape == found.together_s.shape == (3, len(cores))
    assert (found.alone_s > 1e-6).all()
    assert (found.together_s > 1e-6).all()
    assert os.sched_getaffinity(0) == mine


def test_a_core_that_is_not_there_is_refused():
    with pytest.raises(OSError, match="Invalid argument"):
        core_speeds([sorted(os.sched_getaffinity(0))[0], 1 << 12], windows=1, window_s=0.001)


def test_slow_windows_count_over_quick_ones():
    steady = np.full((50, 4), 2e-4)
    slow = steady.copy()
    slow[:, 1] *= 1.8
    assert CoreSpeeds((0, 1, 2, 3), steady, steady).alone == pytest.approx(1.0)
    assert CoreSpeeds((0, 1, 2, 3), slow, steady).alone == pytest.approx(1.8)
    assert CoreSpeeds((0, 1, 2, 3), steady, slow).together == pytest.approx(1.8)
    one = steady.copy()
    one[7, 2] *= 9.0  # a single window may be anybody's
    assert CoreSpeeds((0, 1, 2, 3), one, one).together == pytest.approx(1.0)
