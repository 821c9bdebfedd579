"""`exchange` and `gather`: what every process of a run says, over the default process group."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def exchange(mine: Any) -> list[Any]:
    """Every process's document, by rank; called by all processes at the same time.

    ``torch.distributed`` moves objects by pickle, which is never read here.

    Args:
        mine: what ``json`` can write.

    Raises:
        RuntimeError: another process has gone.
    """
    import torch

    told = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    sizes = [int(size) for size in gather(torch.tensor([len(told)]))]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(told)] = told
    return [
        json.loads(part[:size].numpy().tobytes())
        for part, size in zip(gather(padded), sizes, strict=True)
    ]


def gather(mine: Tensor) -> list[Tensor]:
    """Every process's tensor, by rank; called by all processes at the same time.

    Returns when gloo's thread has also dropped the operation, which it does some time after it has
    said that it is done. To drop one, the thread takes the interpreter's lock; in an interpreter
    that is ending this aborts the process (``std::terminate`` out of ``PyThread_exit_thread``;
    torch 2.13, Python 3.11), so that a script could not end right after a step.

    Args:
        mine: of the same shape and type everywhere, on the device of the group's backend.

    Raises:
        RuntimeError: another process has gone.
    """
    import torch
    import torch.distributed as dist

    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    held = [mine, *everyone]
    before = _references(held)
    dist.all_gather(everyone, mine)
    if mine.device.type == "cpu":
        for _ in range(5000):  # 0.1 s at least; it is done within some 20 us on an idle core
            if _references(held) == before:
                break
            time.sleep(2e-5)
    return everyone


def _references(tensors: Sequence[Tensor]) -> list[int]:
    return [sys.getrefcount(tensor) for tensor in tensors]
