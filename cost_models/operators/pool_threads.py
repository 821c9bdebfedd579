"""`pool_thread_s`: what pools take on a GPU, by the thread that goes through each window.

A thread of torch's kernels computes one output of a pool, or one input of its gradient
(``DilatedMaxPool2d.cu``, ``AveragePool2d.cu``): it reckons where its window lies, with divisions,
and goes through it element by element. Of windows of 2 x 2 that takes longer than moving them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.operators.operator_work import OperatorWork
from foreplan.datasets.sweeps.image_cases import INTERPOLATED
from foreplan.datasets.sweeps.operator_table import OperatorTable

Floats = NDArray[np.float64]

#: Clock cycles of a multiprocessor for each result, and for each element that it looks at: of the
#: largest and of means, of images whose rows lie together and of those with channels last. Least
#: absolute errors of logarithms over 2,331 pools and 2,951 gradients of an H200 in the sixth sweep
#: inside CUDA graphs (fitted). Structure alone is then 8-12 % off where rows lie together. Channels
#: last leave the largest 33-49 off, a mean, which has no constants of its own, 47 and its gradient
#: 7; trees correct that.
_LARGEST, _LARGEST_LAST, _MEAN = (2.2, 0.21), (1.3, 0.43), (2.3, 0.11)
_BACK_LARGEST, _BACK_LARGEST_LAST, _BACK_MEAN = (2.3, 0.23), (0.9, 0.65), (3.8, 0.6)
#: Interpolated images (``UpSampleBilinear2d.cu``, ``UpSampleBicubic2d.cu``): a thread a place of
#: the result goes through all images and channels one by one, so that small images leave most of a
#: GPU idle. Clock cycles of a turn, and of a multiprocessor for each element where there are enough
#: threads, of windows of two and of four: medians of an H200 in the eighth sweep (fitted). With
#: channels last, and going back through windows of two, a thread has one element; going back
#: through windows of four a turn adds to 16 elements that others add to.
_TURN, _ENOUGH = (600.0, 1350.0), (0.9, 1.9)
_OF_TWO, _BACK_OF_TWO, _BACK_OF_FOUR = 2.3, 5.5, 17000.0


def pool_thread_s(table: OperatorTable, work: OperatorWork, clock_hz: Floats) -> Floats:
    """Seconds (N,) of pools and their gradients, 0 of all others.

    Args:
        table: the rows (N,).
        work: with the multiprocessors of each row's device.
        clock_hz: of their devices (N,).
    """
    d, back = table.dims, table.kind == "pool_gradient"
    pool = back | (table.kind == "pool")
    results = d["rows"] * np.where(back, d["cols"], 1.0)
    # An input's gradient comes from each window that covers it.
    looked = d["window"] ** 2 / np.where(back, np.maximum(d["cols"], 1.0), 1.0)
    mean, last = d["average"] > 0, d["channels_last"] > 0
    result, element = (
        np.where(
            back,
            np.where(mean, _BACK_MEAN[i], np.where(last, _BACK_LARGEST_LAST[i], _BACK_LARGEST[i])),
            np.where(mean, _MEAN[i], np.where(last, _LARGEST_LAST[i], _LARGEST[i])),
        )
        for i in (0, 1)
    )
    cycles = results * (result + element * looked) / work.units
    cycles = np.where(mean & (d["average"] == INTERPOLATED), _interpolated(d, work, back), cycles)
    return np.asarray(np.where(pool, cycles / clock_hz, 0.0))


def _interpolated(d: Mapping[str, Floats], work: OperatorWork, back: NDArray[np.bool_]) -> Floats:
    """Clock cycles of interpolated images (N,)."""
    places = np.maximum(d["side"], 1.0) ** 2
    turns, wide = d["rows"] / places, d["window"] > 2
    turn, enough = (np.where(wide, of[1], of[0]) for of in (_TURN, _ENOUGH))
    plain = turns * np.maximum(turn, places * enough / work.units)
    single = d["rows"] * np.where(back, _BACK_OF_TWO, _OF_TWO) / work.units
    forward = np.where((d["channels_last"] > 0) & ~wide, single, plain)
    return np.asarray(np.where(back, np.where(wide, turns * _BACK_OF_FOUR, single), forward))
