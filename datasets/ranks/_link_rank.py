"""One rank of `datasets.ranks.links`: joins the group, times collectives, answers in JSON."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.ranks._link_memory import through_memory
from foreplan.datasets.ranks._link_store import open_store
from foreplan.datasets.ranks.gloo_wait import nicer_reader, wait_awake
from foreplan.datasets.ranks.host_group import HostGroup
from foreplan.datasets.timing.worker_environment import confine, end_with_parent

#: Repetitions of one size: at least, at most, and the time after which they stop.
_LEAST, _MOST, _SECONDS = 5, 200, 0.15
#: Collectives of which each rank needs something of every other, so that none is done before the
#: last one comes. Over gloo they are timed between computations: for this long, after products of
#: so many rows (0.4 ms on a core, as a layer's pieces of decoding are), in so many blocks.
_MEETINGS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_BETWEEN_S, _BETWEEN_ROWS, _BLOCKS = 0.3, 256, 5
#: Seconds that one operation may take, and words of the errors of a rank that has lost another one
#: or waited for it for too long; other errors say that a library cannot do what was asked.
_PATIENCE_S = 120.0
_LOST = ("timed out", "timeout", "connection", "closed", "reset", "gone", "did not come")
#: Round trips between two ranks that are timed as one.
_TRIPS = 4
#: What runs beside computation to see what it takes from it: kinds, bytes of one between processors
#: and between GPUs, and how many at once (more than caches hold, as the parameters of a step).
_BESIDE_KINDS = ("all_reduce", "all_gather", "reduce_scatter")
_BESIDE_BYTES, _GPU_BESIDE_BYTES, _BESIDE_COUNT = 8 << 20, 64 << 20, 8


class _Rank:
    """This process as a member of the group."""

    def __init__(self, settings: dict[str, Any], channel: TextIO) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.settings, self.channel = torch, dist, settings, channel
        self.rank, self.world = int(settings["rank"]), int(settings["world"])
        name = DeviceName.parse(settings["device"])
        self.word = "cpu" if name.kind == "cpu" else f"cuda:{name.index}"
        if name.kind == "cpu":
            torch.set_num_threads(1)
        else:
            torch.cuda.set_device(name.index or 0)
        self.members, self.place, self.idle = self.world, self.rank, False
        self.beside: Any = None  # what a GPU computes beside collectives, once it is needed
        self.group: Any = None  # of collectives beside computation
        self.meeting: Any = None  # of those that are waited for on the spot
        self.host: HostGroup | None = None  # the same, where the group shares memory
        limit = datetime.timedelta(seconds=float(settings["timeout_s"]))
        # One operation of a group that is complete takes seconds on a busy machine, not minutes.
        each = min(limit, datetime.timedelta(seconds=_PATIENCE_S))
        self.store: Any = None
        if "port" in settings:
            meeting = datetime.timedelta(seconds=float(settings["meeting_s"]))
            self.store = open_store(settings, meeting)
            # The whole group's rendezvous goes through the one store.
            dist.init_process_group(
                settings["backend"], store=self.store, rank=self.rank, world_size=self.world,
                timeout=each,
            )  # fmt: skip
        else:
            dist.init_process_group(
                settings["backend"], init_method=settings["rendezvous"], rank=self.rank,
                world_size=self.world, timeout=each,
            )  # fmt: skip

    # ------------------------------------------------------------------------------ measuring

    def measure(self) -> dict[str, Any]:
        """Time every kind and size; the same on all ranks, rank 0's clock counts.

        Kinds that plans use among some of the ranks are timed in groups of 2, 4, ... neighbours as
        well, all groups at the same time.
        """
        samples: list[tuple[str, int, int, float]] = []
        unsupported: dict[str, str] = {}
        beside: list[tuple[str, int, int, float]] = []
        waited: list[tuple[str, int, int, float]] = []
        lags: list[tuple[str, int, float]] = []
        for members in _group_sizes(self.world):
            self._open_group(members)
            for kind in self.settings["kinds"]:
                ranks = 2 if kind == "p2p" else members
                if members < self.world and kind not in _BESIDE_KINDS:
                    continue
                for size in self.settings["sizes"] if kind not in unsupported else ():
                    self.say(f"{kind} of {size} bytes among {ranks} ranks")
                    try:
                        call, ready = self._call(kind, size)
                        ready()
                        call(0)  # the first call sets connections up
                    except (RuntimeError, NotImplementedError, ValueError) as error:
                        unsupported[kind] = " ".join(str(error).split())[:200]
                        if any(word in unsupported[kind].lower() for word in _LOST):
                            raise
                        break
                    if kind in _MEETINGS and self.word == "cpu":
                        took_s, _ = self._between(call)
                    elif kind in _MEETINGS:
                        took_s = self._queued(call)
                    else:  # messages go there and back
                        took_s = self._time(call, ready) / (2 * _TRIPS if kind == "p2p" else 1)
                    samples.append((kind, ranks, size, took_s))
            if self._agree(self.host is not None or self.idle):
                found, apart = through_memory(
                    self.settings, members, self.host, self._between, self.say
                )
                waited += found
                lags += apart
            self.say(f"collectives beside computation among {members} ranks")
            size = _BESIDE_BYTES if self.word == "cpu" else _GPU_BESIDE_BYTES
            beside += [
                (kind, members, size, self._lost_s(kind, size))
                for kind in _BESIDE_KINDS
                if kind in self.settings["kinds"] and kind not in unsupported
            ]
        return {
            "samples": samples, "unsupported": unsupported, "beside": beside, "waited": waited,
            "lags": lags,
        }  # fmt: skip

    def say(self, doing: str) -> None:
        """Tell the parent what is measured now, so that it can say what did not end."""
        print(json.dumps({"doing": doing}), file=self.channel, flush=True)

    def _agree(self, mine: bool) -> bool:
        """Whether it holds on every rank."""
        agreed = self.torch.tensor([int(mine)], device=self.word)
        self.dist.all_reduce(agreed, op=self.dist.ReduceOp.MIN)
        return bool(agreed.item())

    def _open_group(self, members: int) -> None:
        """Join the group of ``members`` neighbours, as number ``place`` of it.

        Ranks that are left over form no group: they keep step and communicate nothing.
        """
        self.members, self.place = members, self.rank % members
        starts = range(0, self.world - members + 1, members)
        self.idle = self.rank // members >= len(starts)

        def open_groups() -> Any:
            groups = [self.dist.new_group(list(range(a, a + members))) for a in starts]
            return None if self.idle else groups[self.rank // members]

        self.group = open_groups() if members < self.world else None
        self.meeting = self.group
        if self.word == "cpu":
            with nicer_reader():
                self.meeting = open_groups()
        self.host = None
        if self.word == "cpu" and not self.idle and "rendezvous" in self.settings:
            first = self.rank - self.place
            ranks, limit_s = range(first, first + members), float(self.settings["timeout_s"])
            self.host = HostGroup.open(ranks, self.meeting, min(limit_s, _PATIENCE_S))

    def _lost_s(self, kind: str, size: int) -> float:
        """Seconds that computation loses to one collective of several that run beside it."""
        tensors = [self.torch.zeros(size // 4, device=self.word) for _ in range(_BESIDE_COUNT)]
        turn, count = itertools.cycle(tensors), 0 if self.idle else _BESIDE_COUNT

        def start() -> Any:
            return self._start(kind, next(turn), self.group)

        if self.word == "cpu":
            from foreplan.datasets.ranks.core_collectives import lost_on_core

            return lost_on_core(start, count, self.dist.barrier, self._first)
        from foreplan.datasets.ranks.gpu_collectives import BesideCollectives

        self.beside = self.beside or BesideCollectives(self.word, self.dist.barrier, self._first)
        return float(self.beside.lost_seconds(start, count))

    def _queued(self, call: Callable[[int], None]) -> float:
        from foreplan.datasets.ranks.gpu_collectives import queued_seconds

        return queued_seconds(partial(call, 0))

    def _start(self, kind: str, whole: Any, group: Any) -> Any:
        """Start a collective in place, as a run does."""
        dist = self.dist
        if kind == "all_reduce":
            return dist.all_reduce(whole, group=group, async_op=True)
        part = whole.chunk(self.members)[self.place]
        if kind == "all_gather":
            return dist.all_gather_into_tensor(whole, part, group=group, async_op=True)
        return dist.reduce_scatter_tensor(part, whole, group=group, async_op=True)

    def _time(self, call: Callable[[int], None], ready: Callable[[], None]) -> float:
        self._sync()
        self.dist.barrier()
        once = min(self._timed(call, turn, ready) for turn in range(2))
        # Every rank must repeat equally often; the first one's estimate decides.
        turns = range(self._agreed(_SECONDS / max(once, 1e-7)))
        return statistics.median(self._timed(call, turn, ready) for turn in turns)

    def _between(self, call: Callable[[int], None]) -> tuple[float, Any]:
        """Mean seconds of a collective between computations, from when the last rank came to it.

        So runs meet them, and they pay for every one: back to back the median of those of 12 KB was
        0.1 ms where runs took 1.8 (see `foreplan.datasets.ranks.gloo_wait`). Who comes last waits
        for nobody, so the least time of the ranks counts. Of some means the middle one is kept, so
        that a moment of other work does not decide.

        Returns:
            The mean, and what each computation took this rank of its core, seconds, ``(turns,)``.
        """
        torch, dist = self.torch, self.dist
        a = torch.randn(_BETWEEN_ROWS, _BETWEEN_ROWS)

        def once(turn: int) -> tuple[float, float]:
            # Time on the core: what other processes take of it is no price of the work.
            started = time.thread_time()
            torch.mm(a, a)
            return time.thread_time() - started, self._timed(call, turn)

        dist.barrier()
        started = time.perf_counter()
        for turn in range(2):
            once(turn)
        turns = range(self._agreed(_BETWEEN_S * 2 / (time.perf_counter() - started)))
        worked_s, took_s = torch.tensor([once(turn) for turn in turns], dtype=torch.float64).T
        took_s = took_s.contiguous()
        if not self.idle:
            dist.all_reduce(took_s, op=dist.ReduceOp.MIN, group=self.meeting)
        middle_s = statistics.median(float(block.mean()) for block in took_s.chunk(_BLOCKS))
        return middle_s, worked_s.contiguous()

    def _agreed(self, count: float) -> int:
        """Repetitions within the bounds; those of the first rank, so that all repeat as often."""
        return self._first(max(_LEAST, min(_MOST, int(count))))

    def _first(self, count: float) -> int:
        """The first rank's number, at least 1."""
        shared = self.torch.tensor([max(1, round(count))], device=self.word)
        self.dist.broadcast(shared, 0)
        return int(shared.item())

    def _timed(
        self, call: Callable[[int], None], turn: int, ready: Callable[[], None] | None = None
    ) -> float:
        if ready is not None:
            ready()
        started = time.perf_counter()
        call(turn)
        self._sync()
        return time.perf_counter() - started

    def _sync(self) -> None:
        if self.word != "cpu":
            self.torch.cuda.synchronize()

    def _call(self, kind: str, size: int) -> tuple[Callable[[int], None], Callable[[], None]]:
        """One collective with a payload of ``size`` bytes, and what comes before it untimed.

        It is started and waited for as in runs, where none goes beside computation.
        Numbers are fp32, as the gradients that runs sum: gloo takes three times as long to sum as
        many bytes of bf16 (on two cores of an EPYC). Payloads as in `foreplan.datasets.tier`.
        """
        torch, dist, world = self.torch, self.dist, self.members
        count = max(size // 4, world)
        count += -count % world
        whole = torch.zeros(count, device=self.word)  # repeated sums of ones would overflow
        if kind == "p2p":
            return self._ping_pong(whole)

        def start(turn: int) -> Any:
            if kind in _BESIDE_KINDS:
                return self._start(kind, whole, self.meeting)
            if kind == "broadcast":
                # The root goes round: a rank can only send on what it has received, so that a
                # sender's buffers do not hide the transfer.
                return dist.broadcast(whole, turn % world, async_op=True)
            return dist.all_to_all_single(other, whole, group=self.meeting, async_op=True)

        def call(turn: int) -> None:
            if self.idle:
                return
            work = start(turn)
            if self.word == "cpu":
                wait_awake(work, kind)
            else:
                work.wait()

        other = torch.empty_like(whole) if kind == "all_to_all" else whole
        return call, _nothing

    def _ping_pong(self, message: Any) -> tuple[Callable[[int], None], Callable[[], None]]:
        """Round trips between ranks 0 and 1; receives are posted before their messages, as in runs.

        gloo otherwise asks the receiver, and the answer takes it 2 ms instead of 0.02 (on two cores
        of an EPYC). NCCL runs what two ranks exchange in the order in which it is posted, so that
        there the message comes first.
        """
        dist, gloo, answer = self.dist, self.word == "cpu", self.torch.empty_like(message)
        posted: list[Any] = []

        def send(peer: int) -> Any:
            return dist.isend(message, peer)

        def receive(peer: int) -> Any:
            return dist.irecv(answer, peer)

        first, second = (receive, send) if gloo else (send, receive)

        def ready() -> None:
            if self.rank == 1 and gloo:
                posted.append(receive(0))
            dist.barrier()

        def call(_: int) -> None:
            for left in reversed(range(_TRIPS if self.rank < 2 else 0)):
                if self.rank == 0:
                    works = [first(1), second(1)]
                else:
                    (posted.pop() if posted else receive(0)).wait()
                    if left and gloo:
                        posted.append(receive(0))
                    works = [send(0)]
                for work in works:
                    work.wait()

        return call, ready

    def close(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Share rank 0's answer with the other host, and leave the group."""
        if self.store is not None:
            if self.rank == 0:
                self.store.set("foreplan/answer", json.dumps(answer))
                self.store.wait(["foreplan/done"])
            else:
                answer = json.loads(self.store.get("foreplan/answer"))
                self.store.set("foreplan/done", "1")
        else:
            self.dist.barrier()
        with contextlib.suppress(RuntimeError):  # the peer may be gone already
            self.dist.destroy_process_group()
        return answer


def _group_sizes(world: int) -> list[int]:
    """Ranks of the groups that are measured: all, then 2, 4, ... below that."""
    return [world, *(1 << power for power in range(1, world.bit_length()) if 1 << power < world)]


def _nothing() -> None:
    """What most collectives need before they are timed."""


def main() -> None:
    """Run the rank; see the module."""
    settings = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    end_with_parent(settings["parent"])
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    code = 0
    try:
        confine(settings["cores"])
        rank = _Rank(settings, channel)
        answer = rank.close(rank.measure())
    except Exception as error:
        name = "" if isinstance(error, TimeoutError) else f"{type(error).__name__}: "
        answer, code = {"error": " ".join(f"{name}{error}".split())[:300]}, 1
    print(json.dumps(answer), file=channel, flush=True)
    os._exit(code)  # a backend's threads must not hold the process


if __name__ == "__main__":
    main()
