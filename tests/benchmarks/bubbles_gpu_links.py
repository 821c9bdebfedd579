"""`LinkMeasuring`: how one process of `bubbles_on_gpus.py` measures links: messages, sums."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
from bubbles_gpu_plans import MESSAGES, RANKS
from bubbles_gpu_process import QUEUING_CYCLES, Process

#: Collectives that are timed in turn.
IN_TURN = 4


class LinkMeasuring(Process):
    """A process that measures links; all call the same methods at the same time."""

    def tier(self) -> dict[str, Any]:
        """Links as fits: messages with computation beside them, collectives alone."""
        import torch
        import torch.distributed as dist

        fits = [self._messages()]
        mine = {}  # group of so many neighbours; all groups at the same time
        for ranks in sorted({2, min(4, RANKS), RANKS}):
            groups = [
                dist.new_group(list(range(a, a + ranks)), backend=self.backend)
                for a in range(0, RANKS, ranks)
            ]
            mine[ranks] = groups[self.rank // ranks]
        sizes = (1 << 14, 1 << 16) if self.processor else (1 << 22, 1 << 25, 1 << 28)
        kinds = [(k, r) for r in mine for k in ("all_reduce", "all_gather", "reduce_scatter")]
        for kind, ranks in kinds:
            seconds, group = [], mine[ranks]
            for size in sizes:
                whole = torch.zeros(size // 4, device=self.device)
                own = whole.chunk(ranks)[self.rank % ranks]
                if self.processor:
                    own = own.clone()
                run = {
                    "all_reduce": lambda w=whole, g=group: dist.all_reduce(w, group=g),
                    "all_gather": lambda w=whole, o=own, g=group: dist.all_gather_into_tensor(
                        w, o, group=g
                    ),
                    "reduce_scatter": lambda w=whole, o=own, g=group: dist.reduce_scatter_tensor(
                        o, w, group=g
                    ),
                }[kind]
                dist.barrier()
                seconds.append(self._sum_s(run))
            fits.append(_fit(kind, ranks, sizes, seconds))
        merged: list[Any] = [None] * RANKS
        dist.all_gather_object(merged, fits)
        message = merged[0][0]
        return {
            "group": ["all"], "scope": "host", "latency_s": message["alpha_s"],
            "bandwidth_bytes_per_s": 1.0 / max(message["beta_s_per_byte"], 1e-15),
            "collectives": merged[0], "backend": self.backend,
            "source": "measured in this run, messages beside computation",
            "compute_share": self._compute_share(mine[2]),
        }  # fmt: skip

    def _sum_s(self, run: Callable[[], Any], times: int = 5) -> float:
        """Seconds of a collective that its host has queued before it begins, as a graph's.

        Median over rounds; the first of a round makes the ranks meet.
        """
        import torch

        if self.processor:
            return self.timed(run, times)
        found = []
        for _ in range(times):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(QUEUING_CYCLES)
            run()
            begin.record()
            for _ in range(IN_TURN):
                run()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) * 1e-3 / IN_TURN)
        return float(np.median(found))

    def _compute_share(self, group: Any) -> float:
        """What products lose to a sum beside them, as a share of its time; as in a profile."""
        import torch
        import torch.distributed as dist

        whole = torch.zeros((1 << 16) if self.processor else (1 << 26), device=self.device)
        size = 256 if self.processor else 4096
        a = torch.randn(size, size, device=self.device).to(self.dtype)
        alone = self.timed(lambda: dist.all_reduce(whole, group=group))
        count = max(1, round(3.0 * alone / self.timed(lambda: torch.mm(a, a))))
        counts: list[Any] = [count]
        dist.broadcast_object_list(counts)

        def products(*, beside: bool) -> None:
            work = dist.all_reduce(whole, group=group, async_op=True) if beside else None
            for _ in range(counts[0]):
                torch.mm(a, a)
            if work is not None:
                work.wait()

        lost = []
        for _ in range(5):
            dist.barrier()
            without = self.timed(lambda: products(beside=False), 1)
            dist.barrier()
            lost.append(self.timed(lambda: products(beside=True), 1) - without)
        told: list[Any] = [min(1.0, max(0.0, float(np.median(lost)) / alone))]
        dist.broadcast_object_list(told)
        return float(told[0])

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
