"""What a small sum between two pinned processes takes, waiting asleep or awake.

``python tests/benchmarks/collective_waits.py`` starts two processes, each on a core of its own, and
prints milliseconds of an all-reduce of 12 KB over gloo: behind a product of matrices, and back to
back; waited for by blocking, and by asking again and again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

TIMES = 200


def run(rank: int, store: str) -> None:
    """One of the two processes."""
    import torch
    import torch.distributed as dist

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    a, message = torch.randn(400, 400), torch.zeros(3072)

    def add(awake: bool) -> None:
        work = dist.all_reduce(message, async_op=True)
        assert work is not None
        while awake and not work.is_completed():
            os.sched_yield()
        work.wait()

    def milliseconds(call: Callable[[], object]) -> float:
        for _ in range(5):
            call()
        dist.barrier()
        started = time.perf_counter()
        for _ in range(TIMES):
            call()
        return 1e3 * (time.perf_counter() - started) / TIMES

    alone = milliseconds(lambda: a @ a @ a)
    for awake in (False, True):
        behind = milliseconds(lambda awake=awake: (a @ a @ a, add(awake)))  # type: ignore[misc]
        hot = milliseconds(lambda awake=awake: add(awake))  # type: ignore[misc]
        if rank == 0:
            print(f"{'awake' if awake else 'asleep'}: {behind - alone:.2f} ms behind a product of "
                  f"{alone:.2f} ms, {hot:.2f} ms back to back", flush=True)  # fmt: skip
    os._exit(0)  # gloo's threads must not outlive the interpreter


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        command = [sys.executable, __file__, store]
        ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
        codes = [process.wait() for process in ranks]
        if any(codes):
            sys.exit("a process failed")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        run(int(sys.argv[2]), sys.argv[1])
    else:
        main()
