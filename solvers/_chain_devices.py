"""`CountedDevices`: the types whose used devices a dynamic programme keeps count of.

Counting all types makes a node of every vector of used devices, `prod(counts + 1)` of them. Few
chains that cost little use more devices of a type than there are: of types that are not counted any
number may be used, which bounds from below what chains cost, and says exactly what the cheapest
does if it keeps to the counts all the same (decremental state space relaxation).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from foreplan.solvers.chain_problem import IntArray


@dataclass(frozen=True, slots=True)
class CountedDevices:
    """Vectors of used devices of some types.

    Attributes:
        counts: devices a type.
        which: whether each type is counted.
        used: ``[U, K]`` all vectors of used devices, 0 of types that are not counted.
        stride: ``[K]`` adding a device of type k adds ``stride[k]`` to the index of a vector; 0 of
            types that are not counted.
    """

    counts: tuple[int, ...]
    which: tuple[bool, ...]
    used: IntArray
    stride: IntArray

    @property
    def every(self) -> bool:
        """Whether all types are counted."""
        return all(self.which)

    def lacking(self, types: IntArray) -> int | None:
        """The type not counted of which stages use most for what there is, if there are too few.

        Args:
            types: of the stages.
        """
        counts = np.array(self.counts)
        used = np.bincount(types, minlength=len(counts))
        worst = int(np.argmax(np.where(used > counts, used / (counts + 1), 0.0)))
        return worst if used[worst] > counts[worst] else None

    def missing(self, other: CountedDevices) -> int | None:
        """The first type that is counted there and not here."""
        types = (
            k
            for k, both in enumerate(zip(self.which, other.which, strict=True))
            if both == (False, True)
        )
        return next(types, None)

    def counting(self, k: int, most: float = math.inf) -> CountedDevices | None:
        """The same with one more type; ``None`` if that makes more vectors than ``most``."""
        if len(self.used) * (self.counts[k] + 1) > most:
            return None
        return _counted(self.counts, (*self.which[:k], True, *self.which[k + 1 :]))


def counted_devices(counts: IntArray, *, every: bool) -> CountedDevices:
    """Count all types, or none but those of which there is no device.

    Args:
        counts: ``[K]`` devices a type.
        every: whether all.
    """
    known = tuple(int(c) for c in counts)
    return _counted(known, tuple(every or c == 0 for c in known))


def vectors(counts: IntArray) -> int:
    """How many vectors of used devices there are where all types are counted."""
    return math.prod(int(c) + 1 for c in counts)


@functools.lru_cache(maxsize=64)
def _counted(counts: tuple[int, ...], which: tuple[bool, ...]) -> CountedDevices:
    sizes = [c + 1 if w else 1 for c, w in zip(counts, which, strict=True)]
    steps = [math.prod(sizes[k + 1 :]) for k in range(len(sizes))]
    used = np.arange(math.prod(sizes), dtype=np.int64)[:, None] // steps % sizes
    stride = np.where(which, steps, 0)
    return CountedDevices(counts, which, used, stride)
