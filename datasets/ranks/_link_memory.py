"""What neighbours of `foreplan.datasets.ranks._link_rank` exchange through memory, and its lag."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from foreplan.datasets.ranks.host_group import HostGroup
from foreplan.datasets.ranks.lag import lag

#: What `HostGroup` does.
_KINDS = ("all_reduce", "all_gather")
#: Products that stand for what lanes compute between two sums, of whose times the greatest is
#: waited for: 2-3 ms, as half a layer takes them. Of single ones it would be mostly jitter.
_APART = 8


def through_memory(
    settings: Mapping[str, Any],
    members: int,
    host: HostGroup | None,
    between: Callable[[Callable[[int], None]], tuple[float, Any]],
    say: Callable[[str], None],
) -> tuple[list[tuple[str, int, int, float]], list[tuple[str, int, float]]]:
    """Time what ranks that compute nothing meanwhile exchange through shared memory.

    Args:
        settings: of the rank: its kinds and sizes, and how many there are in all.
        members: ranks of a group.
        host: this rank's; ``None`` where it is left over, which keeps step.
        between: times a collective between computations: mean seconds of the collective, and those
            of each computation, shape ``(turns,)``.
        say: takes what is measured now.

    Returns:
        Seconds by kind, ranks and bytes; and by kind and ranks what they wait for the slowest.
    """
    import torch

    found, lags = [], []
    for kind in (k for k in _KINDS if k in settings["kinds"]):
        worked: list[Any] = []
        for size in settings["sizes"]:
            say(f"{kind} of {size} bytes through the memory of {members} ranks")
            count = max(size // 2 // members, 1) * members
            whole = torch.zeros(count, dtype=torch.bfloat16)  # as hidden states are
            took_s, between_s = between(partial(_act, getattr(host, kind, None), whole))
            found.append((kind, members, size, took_s))
            whole_s = between_s[: len(between_s) // _APART * _APART]
            worked.append(whole_s.view(-1, _APART).sum(1))
        lags.append((kind, members, _lag(torch.cat(worked), members, int(settings["world"]))))
    return found, lags


def _act(act: Callable[[Any], None] | None, whole: Any, _: int) -> None:
    """Do it; an idle rank has nothing to do."""
    if act is not None:
        act(whole)


def _lag(worked_s: Any, members: int, world: int) -> float:
    """What the ranks of all groups wait for the slowest of theirs.

    Args:
        worked_s: what equal work took this rank, shape ``(times,)``.
        members: ranks of a group; those left over count in none.
        world: all ranks.
    """
    import torch
    import torch.distributed as dist

    every = [torch.empty_like(worked_s) for _ in range(world)]
    dist.all_gather(every, worked_s)
    grouped = torch.stack(every[: world // members * members])
    return lag(grouped.view(-1, members, len(worked_s)).numpy())
