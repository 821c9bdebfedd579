"""One rank of `foreplan.datasets.links`: joins the group, times collectives, answers in JSON."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.worker_environment import confine

#: Repetitions of one size: at least, at most, and the time after which they stop.
_LEAST, _MOST, _SECONDS = 5, 200, 0.15
#: What runs beside computation to see what it takes from it: bytes of an all-reduce, rows of square
#: products, how much longer than the all-reduce these take alone, and how often.
_BESIDE_BYTES, _BESIDE_ROWS, _BESIDE_TIMES, _BESIDE_TURNS = 4 << 20, 512, 3.0, 9


class _Rank:
    """This process as a member of the group."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.settings = torch, dist, settings
        self.rank, self.world = int(settings["rank"]), int(settings["world"])
        name = DeviceName.parse(settings["device"])
        self.word = "cpu" if name.kind == "cpu" else f"cuda:{name.index}"
        if name.kind == "cpu":
            torch.set_num_threads(1)
        else:
            torch.cuda.set_device(name.index or 0)
        limit = datetime.timedelta(seconds=float(settings["timeout_s"]))
        self.store: Any = None
        if "port" in settings:
            self.store = self._tcp_store(limit)
            # The whole group's rendezvous goes through the one store.
            dist.init_process_group(
                settings["backend"], store=self.store, rank=self.rank, world_size=self.world,
                timeout=limit,
            )  # fmt: skip
        else:
            dist.init_process_group(
                settings["backend"], init_method=settings["rendezvous"], rank=self.rank,
                world_size=self.world, timeout=limit,
            )  # fmt: skip

    def _tcp_store(self, limit: datetime.timedelta) -> Any:
        host, port = self.settings["host"], int(self.settings["port"])
        server = self.rank == 0
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore(host, port, self.world, server, limit, False)
        if server:
            store.set("foreplan/plan", json.dumps([self.settings[k] for k in ("kinds", "sizes")]))
            try:
                store.wait(["foreplan/hello"], limit)
            except RuntimeError as error:
                raise TimeoutError(
                    f"nobody came to {host}:{port} within {limit.total_seconds():g} s"
                ) from error
        else:
            self.settings["kinds"], self.settings["sizes"] = json.loads(store.get("foreplan/plan"))
            store.set("foreplan/hello", "1")
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", _interface(host, server))
        return store

    # ------------------------------------------------------------------------------ measuring

    def measure(self) -> dict[str, Any]:
        """Time every kind and size; the same on all ranks, rank 0's clock counts."""
        samples: list[tuple[str, int, int, float]] = []
        unsupported: dict[str, str] = {}
        for kind in self.settings["kinds"]:
            ranks = 2 if kind == "p2p" else self.world
            for size in self.settings["sizes"]:
                try:
                    call = self._call(kind, size)
                    call(0)  # the first call sets connections up
                except (RuntimeError, NotImplementedError, ValueError) as error:
                    unsupported[kind] = " ".join(str(error).split())[:200]
                    break
                trips = 2 if kind == "p2p" else 1  # there and back
                samples.append((kind, ranks, size, self._time(call) / trips))
        share = 0.0 if "all_reduce" in unsupported else self._compute_share()
        return {"samples": samples, "unsupported": unsupported, "compute_share": share}

    def _compute_share(self) -> float:
        """What computation loses to an all-reduce beside it, as a share of that one's time."""
        torch, dist = self.torch, self.dist
        whole = torch.zeros(_BESIDE_BYTES // 4, device=self.word)
        a = torch.randn(_BESIDE_ROWS, _BESIDE_ROWS, device=self.word)

        def products(count: int) -> None:
            for _ in range(count):
                torch.mm(a, a)

        def beside(count: int) -> None:
            work = dist.all_reduce(whole, async_op=True)
            products(count)
            work.wait()

        link_s = self._time(lambda _: _drop(dist.all_reduce(whole)))
        once_s = min(self._timed(lambda _: products(1), turn) for turn in range(5))
        count = torch.tensor([max(1, round(_BESIDE_TIMES * link_s / once_s))], device=self.word)
        dist.broadcast(count, 0)
        lost = []
        for turn in range(_BESIDE_TURNS):
            dist.barrier()
            alone_s = self._timed(lambda _: products(int(count.item())), turn)
            dist.barrier()
            lost.append(self._timed(lambda _: beside(int(count.item())), turn) - alone_s)
        return min(1.0, max(0.0, statistics.median(lost) / link_s))

    def _time(self, call: Callable[[int], None]) -> float:
        self._sync()
        self.dist.barrier()
        once = min(self._timed(call, turn) for turn in range(2))
        # Every rank must repeat equally often; the first one's estimate decides.
        count = max(_LEAST, min(_MOST, int(_SECONDS / max(once, 1e-7))))
        shared = self.torch.tensor([count], device=self.word)
        self.dist.broadcast(shared, 0)
        return statistics.median(self._timed(call, turn) for turn in range(int(shared.item())))

    def _timed(self, call: Callable[[int], None], turn: int) -> float:
        started = time.perf_counter()
        call(turn)
        self._sync()
        return time.perf_counter() - started

    def _sync(self) -> None:
        if self.word != "cpu":
            self.torch.cuda.synchronize()

    def _call(self, kind: str, size: int) -> Callable[[int], None]:
        """One collective with a payload of ``size`` bytes of bf16; see `foreplan.datasets.tier`."""
        torch, dist, world = self.torch, self.dist, self.world
        count = max(size // 2, world)
        count += -count % world
        whole = torch.ones(count, dtype=torch.bfloat16, device=self.word)
        part = torch.ones(count // world, dtype=torch.bfloat16, device=self.word)
        if kind == "p2p":
            return self._ping_pong(whole)
        if kind == "all_reduce":
            whole.zero_()  # repeated sums of ones would overflow
            return lambda _: _drop(dist.all_reduce(whole))
        if kind == "all_gather":
            return lambda _: _drop(dist.all_gather_into_tensor(whole, part))
        if kind == "reduce_scatter":
            return lambda _: _drop(dist.reduce_scatter_tensor(part, whole))
        if kind == "broadcast":
            # The root goes round: a rank can only send on what it has received, so that a sender's
            # buffers do not hide the transfer.
            return lambda turn: _drop(dist.broadcast(whole, turn % world))
        other = torch.empty_like(whole)
        return lambda _: _drop(dist.all_to_all_single(other, whole))

    def _ping_pong(self, message: Any) -> Callable[[int], None]:
        """A round trip between ranks 0 and 1; who waits has posted its receive, as in a run.

        gloo otherwise asks the receiver first: on two cores of an EPYC 2 ms instead of 0.06.
        """
        dist = self.dist

        def turn(_: int) -> None:
            if self.rank == 0:
                works = [dist.isend(message, 1), dist.irecv(message, 1)]
            elif self.rank == 1:
                dist.irecv(message, 0).wait()
                works = [dist.isend(message, 0)]
            else:
                works = []
            for work in works:
                work.wait()

        return turn

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


def _drop(_: object) -> None:
    """Take a collective's work handle, which a synchronous call leaves empty."""


def _interface(host: str, server: bool) -> str:
    """Network interface that reaches the endpoint (or, on the server, holds its address)."""
    import psutil

    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    if server:
        mine = str(address[0])
    else:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # chooses the route, sends nothing
            mine = str(probe.getsockname()[0])
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address.partition("%")[0] == mine for a in addresses):
            return str(name)
    return "lo"


def _watch_parent(parent: int) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Run the rank; see the module."""
    settings = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _watch_parent(settings["parent"])
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    code = 0
    try:
        confine(settings["cores"])
        rank = _Rank(settings)
        answer = rank.close(rank.measure())
    except Exception as error:
        name = "" if isinstance(error, TimeoutError) else f"{type(error).__name__}: "
        answer, code = {"error": " ".join(f"{name}{error}".split())[:300]}, 1
    print(json.dumps(answer), file=channel, flush=True)
    os._exit(code)  # a backend's threads must not hold the process


if __name__ == "__main__":
    main()
