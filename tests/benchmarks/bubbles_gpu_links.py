"""`LinkMeasuring`: how one process of `bubbles_on_gpus.py` measures links: messages, sums."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
from bubbles_gpu_plans import MESSAGES, RANKS
from bubbles_gpu_process import Process

from foreplan.datasets.ranks.gpu_collectives import BesideCollectives, queued_seconds

#: Collectives at once, to see what they take from computation.
BESIDE = 8


class LinkMeasuring(Process):
    """A process that measures links; all call the same methods at the same time."""

    def tier(self) -> dict[str, Any]:
        """Links as fits: messages with computation beside them, collectives alone."""
        import torch.distributed as dist

        fits = [self._messages()]
        mine = {}  # group of so many neighbours; all groups at the same time
        for ranks in sorted({2, min(4, RANKS), RANKS}):
            groups = [
                dist.new_group(list(range(a, a + ranks)), backend=self.backend)
                for a in range(0, RANKS, ranks)
            ]
            mine[ranks] = groups[self.rank // ranks]
        sizes = (1 << 14, 1 << 16) if self.processor else (1 << 22, 1 << 28, 1 << 25)
        kinds = [(k, r) for r in mine for k in ("all_reduce", "all_gather", "reduce_scatter")]
        beside = None if self.processor else BesideCollectives(self.device, dist.barrier, _agreed)
        for kind, ranks in kinds:
            seconds, share = [], 0.0
            for size in sizes:
                run = self._collective(kind, ranks, size, mine[ranks])
                dist.barrier()
                seconds.append(self.timed(run) if self.processor else queued_seconds(run))
            if beside is not None:  # of the last size
                lost_s = beside.lost_seconds(partial(run, async_op=True), BESIDE)
                told: list[Any] = [min(1.0, lost_s / seconds[-1])]
                dist.broadcast_object_list(told)
                share = told[0]
            fits.append(_fit(kind, ranks, sizes, seconds) | {"compute_share": share})
        merged: list[Any] = [None] * RANKS
        dist.all_gather_object(merged, fits)
        message = merged[0][0]
        return {
            "group": ["all"], "scope": "host", "latency_s": message["alpha_s"],
            "bandwidth_bytes_per_s": 1.0 / max(message["beta_s_per_byte"], 1e-15),
            "collectives": merged[0], "backend": self.backend,
            "source": "measured in this run, messages beside computation",
        }  # fmt: skip

    def _collective(self, kind: str, ranks: int, size: int, group: Any) -> Callable[..., Any]:
        """What carries one out, or starts it with ``async_op``, on tensors of its own."""
        import torch
        import torch.distributed as dist

        whole = torch.zeros(size // 4, device=self.device)
        own = whole.chunk(ranks)[self.rank % ranks]
        if self.processor:
            own = own.clone()
        if kind == "all_reduce":
            return partial(dist.all_reduce, whole, group=group)
        if kind == "all_gather":
            return partial(dist.all_gather_into_tensor, whole, own, group=group)
        return partial(dist.reduce_scatter_tensor, own, whole, group=group)

    def _messages(self) -> dict[str, Any]:
        """Messages to and fro between neighbours while both multiply matrices."""
        import torch
        import torch.distributed as dist

        from foreplan.planner.verify.connections import pair_options

        sizes = (1 << 14, 1 << 16) if self.processor else MESSAGES
        partner, lower = self.rank ^ 1, self.rank % 2 == 0
        options = None if self.processor else pair_options(timedelta(seconds=60))
        pairs = [[a, a + 1] for a in range(0, RANKS, 2)]
        groups = [dist.new_group(p, backend=self.backend, pg_options=options) for p in pairs]
        group = groups[self.rank // 2]
        a = torch.randn(256 if self.processor else 4096, 256 if self.processor else 4096)
        a = a.to(self.device, self.dtype)
        stream = None if self.processor else torch.cuda.Stream()
        seconds = []
        for k, size in enumerate(sizes):
            message = torch.zeros(size, dtype=torch.uint8, device=self.device)

            def trip(message: Any = message, k: int = k) -> None:
                if self.peers is not None:
                    own, other = 10 * self.rank + k, 10 * partner + k
                    if lower:
                        self.peers.send(other, message, stream)
                    self.peers.receive(own, stream)
                    if not lower:
                        self.peers.send(other, message, stream)
                elif lower:
                    dist.send(message, partner, group=group)
                    dist.recv(message, partner, group=group)
                else:
                    dist.recv(message, partner, group=group)
                    dist.send(message, partner, group=group)

            found = []
            for turn in range(6):
                dist.barrier()
                if stream is None:
                    took = self.timed(trip, 1)
                else:
                    for _ in range(12):  # about 4 ms of products
                        torch.mm(a, a)
                    with torch.cuda.stream(stream):
                        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                        begin.record()
                        trip()
                        end.record()
                    self.sync()
                    took = begin.elapsed_time(end) * 1e-3
                if turn > 1:
                    found.append(took / 2)
            seconds.append(float(np.median(found)))
        return _fit("p2p", 2, sizes, seconds)


def _agreed(count: float) -> int:
    """The first rank's number."""
    import torch.distributed as dist

    told: list[Any] = [max(1, round(count))]
    dist.broadcast_object_list(told)
    return int(told[0])


def _fit(kind: str, ranks: int, sizes: Any, seconds: Any) -> dict[str, Any]:
    times, lengths = np.asarray(seconds), np.asarray(sizes, dtype=float)
    beta, alpha = (float(x) for x in np.polyfit(lengths, times, 1, w=1 / times))
    if alpha < 0.0:
        alpha, beta = 1e-6, float(np.median(times / lengths))
    beta = max(beta, 1e-14)
    off = [abs(alpha + beta * size - s) / s for size, s in zip(sizes, seconds, strict=True)]
    return {
        "kind": kind, "ranks": ranks, "alpha_s": alpha, "beta_s_per_byte": beta,
        "residual": float(np.median(off)), "samples": len(sizes),
    }  # fmt: skip
