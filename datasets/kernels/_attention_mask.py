"""`seen_keys`: which keys each query of a call of attention sees. Imports torch."""

from __future__ import annotations

import torch
from torch import Tensor


def seen_keys(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Bool ``[queries, keys]``, true where a query sees a key; the last query sees the last key.

    Args:
        queries: of the call.
        keys: of the call, at least as many.
        window: keys that a query sees at most; ``None`` = all before it.
        device: of the mask.
    """
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return seen if window is None else seen.triu(keys - queries - window + 1)
