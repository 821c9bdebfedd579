"""Cutting a chain of layers into parts so that the longest part is shortest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from foreplan.cost_models.schedule import FloatArray
from foreplan.errors import SpecError

#: Sums of times that differ by less count as equal.
_SLACK = 1e-9


def min_max_cuts(seconds: Sequence[float] | FloatArray, parts: int) -> list[int]:
    """Cut a chain into parts of at least one item; of the best cuts the most even one.

    The recurrence ``F(l, m) = min_j max(F(j, m - 1), sum (j, l])`` (Optimus, section 5.1) gives the
    length of the longest part; among cuts that keep it, the sum of squares is least.

    Args:
        seconds: of each item.
        parts: how many.

    Returns:
        ``parts + 1`` places, from 0 to the number of items.

    Raises:
        SpecError: fewer items than parts.
    """
    total = np.concatenate(([0.0], np.cumsum(np.asarray(seconds, dtype=float))))
    n = len(total) - 1
    if not 1 <= parts <= n:
        raise SpecError("chain", got=f"{n} layers", expected=f"at least the {parts} stages")
    longest, _ = _best(total, parts, np.maximum, lambda length: length)
    limit = float(longest) * (1 + _SLACK)

    def squared(length: FloatArray) -> FloatArray:
        return np.where(length <= limit, length * length, np.inf)

    return _best(total, parts, np.add, squared)[1]


def _best(
    total: FloatArray,
    parts: int,
    join: Callable[[FloatArray, FloatArray], FloatArray],
    price: Callable[[FloatArray], FloatArray],
) -> tuple[float, list[int]]:
    """Least joint price of the parts, and the cuts."""
    n = len(total) - 1
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    choice = np.zeros((parts + 1, n + 1), dtype=np.int64)
    for part in range(1, parts + 1):
        new = np.full(n + 1, np.inf)
        for end in range(part, n + 1):
            value = join(best[:end], price(total[end] - total[:end]))
            choice[part, end] = j = int(np.argmin(value))
            new[end] = value[j]
        best = new
    cuts = [n]
    for part in range(parts, 0, -1):
        cuts.append(int(choice[part, cuts[-1]]))
    return float(best[n]), cuts[::-1]
