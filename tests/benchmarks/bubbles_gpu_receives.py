"""`ReceiveMeasuring`: what receives that wait take from computation, in `bubbles_on_gpus.py`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from bubbles_gpu_measuring import Measuring
from bubbles_gpu_plans import RANKS, WAITING


class ReceiveMeasuring(Measuring):
    """A process that measures; all call the same methods at the same time."""

    def beside_receives(self, name: str) -> dict[str, Any]:
        """Halves of a backbone's layers alone and while receives of NCCL's wait; all ranks alike.

        Receives that are posted early hold multiprocessors until their message comes.
        """
        import torch.distributed as dist

        self._open_waiting()
        runs = self._tower_runs(name, "backbone")
        free = self._time_tower(runs)
        dist.barrier()
        self._wait_for_partner(post=True)
        beside = self._time_tower(runs)
        dist.barrier()
        self._wait_for_partner(post=False)
        parts: list[Any] = [None] * RANKS
        dist.all_gather_object(parts, (free, beside))
        return {"waiting": WAITING, "alone": parts[0][0], "beside": [part[1] for part in parts]}

    def _open_waiting(self) -> None:
        """Several connections each way between neighbours, as a step has them."""
        import torch
        import torch.distributed as dist

        from foreplan.planner.verify.connections import pair_options

        self._ways: dict[tuple[int, int, int], Any] = {}
        self._coming: list[Any] = []
        self._message = torch.zeros(1 << 20, device=self.device)
        for a in range(0, RANKS, 2):
            for source, target in ((a, a + 1), (a + 1, a)):
                for k in range(WAITING):
                    options = pair_options(timedelta(seconds=60))
                    group = self._new_group([a, a + 1], backend="nccl", pg_options=options)
                    if self.rank in (source, target):
                        # Both ends have to make a communicator before one of them waits on it.
                        dist.all_reduce(self._message, group=group)
                        self._ways[source, target, k] = group, torch.cuda.Stream()
        self.sync()
        dist.barrier()

    def _wait_for_partner(self, *, post: bool) -> None:
        """Post receives of the partner's messages, or send it its own."""
        import torch

        for (source, target, _), (group, stream) in self._ways.items():
            with torch.cuda.stream(stream):
                if post and target == self.rank:
                    self._coming.append(torch.empty_like(self._message))
                    group.recv(self._coming[-1:], source % 2, 0)
                elif not post and source == self.rank:
                    group.send([self._message], target % 2, 0)
        if not post:
            self.sync()
            self._coming.clear()
