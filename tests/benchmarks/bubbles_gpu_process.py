"""`Process`: one of the processes of `bubbles_on_gpus.py`, connected, with a clock."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from bubbles_gpu_plans import MESSAGES, RANKS

#: Cycles for which a GPU sleeps while the host queues what is timed: 2 ms.
QUEUING_CYCLES = 4_000_000


class Process:
    """One of the processes that measure and run; all call the same methods at the same time."""

    def __init__(self, rank: int, folder: Path, processor: bool) -> None:
        import torch
        import torch.distributed as dist

        self.rank, self.folder, self.processor = rank, folder, processor
        self.backend = "gloo" if processor else "nccl"
        self.device = torch.device("cpu") if processor else torch.device("cuda", rank)
        if processor:
            torch.set_num_threads(1)
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        else:
            torch.cuda.set_device(rank)
        self.dtype = torch.float32 if processor else torch.bfloat16
        store = dist.FileStore(os.environ["BUBBLES_STORE"], RANKS)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=150)
        )
        #: Thread blocks of collectives' connections; NCCL's own choice where ``None``.
        self.blocks: int | None = None
        #: How many connections of a kind the present run has asked for.
        self.opened: Counter[Any] = Counter()
        self._keep_groups()
        self.peers = self._open_peers()
        self.say(f"messages by {'copy engines' if self.peers else self.backend}")

    def _open_peers(self) -> Any:
        """Memory of the neighbour, or ``None`` where NCCL or gloo has to carry messages."""
        import torch
        import torch.distributed as dist

        from foreplan.planner.verify.peer_memory import Offer, PeerMemory

        if self.processor or "NO_PEERS" in os.environ:
            return None
        partner = self.rank ^ 1
        self._landing = {
            10 * self.rank + k: torch.zeros(size, dtype=torch.uint8, device=self.device)
            for k, size in enumerate(MESSAGES)
        }
        told: list[Any] = [None] * RANKS
        works = True
        try:
            peers = PeerMemory(self._landing, self.device)
            dist.all_gather_object(told, peers.offers())
            offers = {tag: Offer(*o) for part in told for tag, o in part.items()}
            peers.open([10 * partner + k for k in range(len(MESSAGES))], offers)
            self.sync()
            dist.barrier()
            sent = torch.full((MESSAGES[0],), self.rank + 1, dtype=torch.uint8, device=self.device)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            peers.send(10 * partner, sent, stream)
            peers.receive(10 * self.rank, stream)
            done = torch.cuda.Event()
            done.record(stream)
            started = time.monotonic()
            while not done.query() and time.monotonic() < started + 5.0:
                time.sleep(0.01)
            works = done.query() and bool((self._landing[10 * self.rank] == partner + 1).all())
        except (OSError, RuntimeError) as error:
            print(f"rank {self.rank}: no peer memory: {error}", flush=True)
            works = False
        dist.all_gather_object(told, works)
        return peers if all(told) else None

    def _keep_groups(self) -> None:
        """Connections are opened once and kept by every later run: many decisions need few.

        Two that a run opens between the same ranks stay two: messages of both directions in one
        NCCL communicator would wait for one another.
        """
        import torch.distributed as dist

        made: dict[Any, Any] = {}
        self._new_group = new_group = dist.new_group

        def kept(ranks: Any = None, **options: Any) -> Any:
            asked = options.get("pg_options")
            if asked is None and self.blocks and options.get("backend") == "nccl":
                asked = dist.ProcessGroupNCCL.Options()
                asked.config.max_ctas, asked._timeout = (
                    self.blocks,
                    options.get("timeout", timedelta(minutes=1)),
                )
                options["pg_options"] = asked
            ctas = 0 if asked is None else asked.config.max_ctas
            alike = tuple(ranks or ()), options.get("backend"), ctas
            key = *alike, self.opened[alike]
            self.opened[alike] += 1
            if key not in made:
                made[key] = new_group(ranks, **options)
            return made[key]

        dist.new_group = kept

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"{time.strftime('%T')} {text}", flush=True)

    def sync(self) -> None:
        import torch

        if not self.processor:
            torch.cuda.synchronize()

    def drain(self) -> None:
        """Wait for the compute stream alone: a receive may be waiting on another."""
        import torch

        if not self.processor:
            torch.cuda.current_stream().synchronize()

    def timed(self, work: Callable[[], Any], times: int = 5) -> float:
        """Median seconds of a call; a GPU begins when all of it has been queued."""
        import torch

        found = []
        for turn in range(times + 1):
            if self.processor:
                started = time.perf_counter()
                work()
                found.append(time.perf_counter() - started)
            else:
                a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(QUEUING_CYCLES)
                a.record()
                work()
                b.record()
                b.synchronize()
                found.append(a.elapsed_time(b) * 1e-3)
            if turn == 0:
                found.clear()
        return float(np.median(found))
