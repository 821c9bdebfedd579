"""What a sum between two pinned processes takes, by how they wait and how gloo's reader runs.

``python tests/benchmarks/collective_waits.py [BYTES ...]`` starts two processes, each on a core of
its own, and prints for all-reduces of so many bytes (12 and 768 KiB, 8 MiB) behind a product of
matrices: milliseconds from when the last of the two has come (mean, median, 90th percentile) and
how long gloo's reading thread computes for one. Five ways, in turns: gloo's blocking, or awake as
runs do (`foreplan.datasets.ranks.gloo_wait`), with a reader as nice as the others, or nicer; and
through memory that both share (`foreplan.datasets.ranks.host_group`), as where nothing is computed
beside them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from foreplan.datasets.ranks.gloo_wait import nicer_reader, wait_awake
from foreplan.datasets.ranks.host_group import HostGroup

SIZES = (12 << 10, 768 << 10, 8 << 20)
SHARED = "shared memory"
WAYS = ("asleep", "awake", "asleep, nicer reader", "awake, nicer reader", SHARED)
TURNS, TIMES = 8, 30


def readers_s() -> float:
    """Seconds that threads of this process on which gloo reads have computed."""
    tasks = Path("/proc/self/task").iterdir()
    mine = [task for task in tasks if (task / "comm").read_text() == "gloo_tcp_loop\n"]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in mine) / 1e9


def measure(sizes: list[int], rank: int, store: str) -> None:
    """One of the two processes."""
    import torch
    import torch.distributed as dist

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    plain = dist.new_group([0, 1])
    with nicer_reader():
        nicer = dist.new_group([0, 1])
    host = HostGroup.open([0, 1], nicer, timeout_s=60.0)
    if host is None:
        raise SystemExit("the processes cannot share memory")
    a = torch.randn(256, 256)

    def add(message: Any, way: str) -> float:
        a @ a
        started = time.perf_counter()
        if way == SHARED:
            host.all_reduce(message)
            return time.perf_counter() - started
        group = nicer if "nicer" in way else plain
        work: Any = dist.all_reduce(message, group=group, async_op=True)
        if way.startswith("awake"):
            wait_awake(work, "all_reduce")
        else:
            work.wait()
        return time.perf_counter() - started

    for size in sizes:
        message = torch.zeros(size // 2, dtype=torch.bfloat16)
        took: dict[str, list[Any]] = {way: [] for way in WAYS}
        busy_s = dict.fromkeys(WAYS, 0.0)
        for _ in range(TURNS):
            for way in WAYS:
                dist.barrier()
                before_s = readers_s()
                own = torch.tensor([add(message, way) for _ in range(TIMES)])
                busy_s[way] += readers_s() - before_s
                dist.all_reduce(own, op=dist.ReduceOp.MIN)
                took[way].append(own)
        for way in WAYS if rank == 0 else ():
            each = 1e3 * torch.cat(took[way])
            print(f"{size >> 10:5} KiB  {way:21} mean {each.mean():6.2f}  median "
                  f"{each.median():6.2f}  90 % {each.quantile(0.9):6.2f}  reader "
                  f"{1e3 * busy_s[way] / len(each):5.2f} ms", flush=True)  # fmt: skip
    os._exit(0)  # gloo's threads must not outlive the interpreter


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        sizes = [str(size) for size in (sys.argv[1:] or SIZES)]
        command = [sys.executable, __file__, "--rank", str(Path(folder) / "store"), *sizes]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(2)]
        codes = [process.wait() for process in ranks]
        if any(codes):
            sys.exit("a process failed")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        *sizes, rank = map(int, sys.argv[3:])
        measure(sizes, rank, sys.argv[2])
    else:
        main()
