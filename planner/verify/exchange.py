"""`exchange`: what every process of a run says, as JSON, over the default process group."""

from __future__ import annotations

import json
from typing import Any


def exchange(mine: Any) -> list[Any]:
    """Every process's document, by rank; called by all processes at the same time.

    ``torch.distributed`` moves objects by pickle, which is never read here.

    Args:
        mine: what ``json`` can write.

    Raises:
        RuntimeError: another process has gone.
    """
    import torch
    import torch.distributed as dist

    told = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(told)]))
    longest = max(int(size) for size in sizes)
    parts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(told)] = told
    dist.all_gather(parts, padded)
    return [
        json.loads(part[: int(size)].numpy().tobytes())
        for part, size in zip(parts, sizes, strict=True)
    ]
