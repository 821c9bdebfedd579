"""`within_window`: attention of a layer with a sliding window, made of calls of one without."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from foreplan.datasets.kernels.quantised_cache import QuantisedCache
from foreplan.datasets.models.attention_window import spans

#: Keys or values ``[B, G, L, D]``, plain or quantised.
_Cache = Tensor | QuantisedCache
_Attend = Callable[..., Tensor]


def within_window(attend: _Attend, window: int) -> _Attend:
    """The attention of a layer with a window, piece by piece as `spans` has it.

    Args:
        attend: ``f(q[B, T, H, D], cache_k[B, G, L, D], cache_v, keys[, window])``, causal.
        window: keys that a query sees at most.

    Returns:
        The same without ``window``.
    """

    def run(q: Tensor, cache_k: _Cache, cache_v: _Cache, keys: int) -> Tensor:
        queries = q.shape[1]
        pieces = spans(queries, keys, window)
        out = None if len(pieces) == 1 else q.new_empty(q.shape)
        for query, count, key, seen, banded in pieces:
            piece = q[:, query : query + count]
            place = (slice(None), slice(None), slice(key, key + seen))
            asked = (piece, cache_k[place], cache_v[place], seen)
            made = attend(*asked, window) if banded else attend(*asked)
            if out is None:
                return made
            out[:, query : query + count] = made
        assert out is not None  # a pass has queries
        return out

    return run
