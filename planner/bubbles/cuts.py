"""Cutting a chain of layers into parts so that the longest part is shortest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from foreplan.cost_models.schedule import FloatArray
from foreplan.errors import InfeasibleError, SpecError

#: Sums of times that differ by less count as equal.
_SLACK = 1e-9


def even_cuts(layers: int, parts: int) -> list[int]:
    """Cuts of layers into parts that differ by one layer at most, the longer ones in front.

    Args:
        layers: at least one a part.
        parts: how many.

    Returns:
        ``parts + 1`` cuts, 0 and ``layers`` among them.
    """
    return [-(-layers * part // parts) for part in range(parts + 1)]


def min_max_cuts(
    seconds: Sequence[float] | FloatArray,
    parts: int,
    fits: Callable[[int, int, int], bool] | None = None,
) -> list[int]:
    """Cut a chain into parts of at least one item; of the best cuts the most even one.

    The recurrence ``F(l, m) = min_j max(F(j, m - 1), sum (j, l])`` (Optimus, section 5.1) gives the
    length of the longest part; among cuts that keep it, the sum of squares is least.

    Args:
        seconds: of each item, or ``[parts, items]`` where they depend on the part.
        parts: how many.
        fits: whether a part can hold items ``[start, end)``, asked as ``(part, start, end)``; all
            can if left out.

    Returns:
        ``parts + 1`` places, from 0 to the number of items.

    Raises:
        SpecError: fewer items than parts.
        InfeasibleError: no cut whose parts all fit.
    """
    each = np.asarray(seconds, dtype=float)
    n = each.shape[-1]
    if not 1 <= parts <= n:
        raise SpecError("chain", got=f"{n} layers", expected=f"at least the {parts} stages")
    total = np.zeros((parts, n + 1))
    total[:, 1:] = np.cumsum(each, axis=-1)

    def lengths(part: int, end: int) -> FloatArray:
        found: FloatArray = total[part, end] - total[part, :end]
        if fits is not None:
            found[[not fits(part, start, end) for start in range(end)]] = np.inf
        return found

    longest, _ = _best(parts, n, lengths, np.maximum)
    if longest == np.inf:
        raise InfeasibleError(f"no cut of {n} layers into {parts} stages fits")
    limit = longest * (1 + _SLACK)

    def squares(part: int, end: int) -> FloatArray:
        length = lengths(part, end)
        return np.where(length <= limit, length * length, np.inf)

    return _best(parts, n, squares, np.add)[1]


def _best(
    parts: int,
    n: int,
    price: Callable[[int, int], FloatArray],
    join: Callable[[FloatArray, FloatArray], FloatArray],
) -> tuple[float, list[int]]:
    """Least joint price, and the cuts; ``price(part, end)`` is of each start below ``end``."""
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    choice = np.zeros((parts + 1, n + 1), dtype=np.int64)
    for part in range(1, parts + 1):
        new = np.full(n + 1, np.inf)
        for end in range(part, n + 1):
            value = join(best[:end], price(part - 1, end))
            choice[part, end] = j = int(np.argmin(value))
            new[end] = value[j]
        best = new
    cuts = [n]
    for part in range(parts, 0, -1):
        cuts.append(int(choice[part, cuts[-1]]))
    return float(best[n]), cuts[::-1]
