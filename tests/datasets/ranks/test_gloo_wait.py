"""Two real processes over loopback, and what waits without any."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from foreplan.datasets.ranks import gloo_wait
from foreplan.datasets.ranks.gloo_wait import wait_awake

#: Rank 1 comes late to the second sum, later than anybody stays awake, and never to the last.
RANK = """
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from foreplan.datasets.ranks.gloo_wait import _readers, nicer_reader, patient_reader, wait_awake
rank, store = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2,
                        timeout=timedelta(seconds=300))
said = []
with nicer_reader():
    group = dist.new_group([0, 1])
own = os.getpriority(os.PRIO_PROCESS, os.getpid())
said.append([os.getpriority(os.PRIO_PROCESS, t) - own for t in sorted(_readers())])
with patient_reader():
    messages = dist.new_group([0, 1])
said.append([os.sched_getscheduler(t) == os.SCHED_BATCH for t in sorted(_readers())])
for late_s in (0.0, 0.2):
    if rank == 1:
        time.sleep(late_s)
    message = torch.full((3072,), 1.0 + rank)
    wait_awake(dist.all_reduce(message, group=group, async_op=True), "all_reduce")
    said.append(float(message.sum()))
part = torch.zeros(1536)
wait_awake(dist.reduce_scatter_tensor(part, torch.ones(3072), group=group, async_op=True),
           "reduce_scatter")
said.append(float(part.sum()))
if rank == 0:
    try:
        wait_awake(dist.all_reduce(message, group=group, async_op=True), "all_reduce")
    except RuntimeError:
        said.append("lost")
print(said, flush=True)
os._exit(0)  # gloo's threads must not outlive the interpreter
"""


def test_sums_are_done_and_a_lost_rank_is_an_error(tmp_path: Path) -> None:
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")],
            env=environment, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=300)[0].strip() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    total, part = 3.0 * 3072, 2.0 * 1536
    nice = [0, min(10, 19 - os.getpriority(os.PRIO_PROCESS, 0))]
    both = f"[{nice}, [False, False, True], {total}, {total}, {part}"
    assert said == [f"{both}, 'lost']", f"{both}]"]


class Work:
    """Done after it was asked some times."""

    def __init__(self, times: float) -> None:
        self.times, self.asked, self.waited = times, 0, 0

    def is_completed(self) -> bool:
        self.asked += 1
        return self.asked > self.times

    def wait(self) -> None:
        self.waited += 1


@pytest.mark.parametrize("times", [0, 3, float("inf")])
def test_it_asks_for_a_while_and_then_waits(times: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1_000_000_000, 1_000_000))
    monkeypatch.setattr(gloo_wait, "time", SimpleNamespace(monotonic_ns=lambda: next(clock)))
    work = Work(times)
    wait_awake(work, "all_reduce")
    assert work.waited == 1
    assert work.asked == min(times + 1, 10)


def test_it_stays_awake_for_nothing_that_ends_only_in_its_wait() -> None:
    work = Work(float("inf"))
    wait_awake(work, "reduce_scatter")
    assert work.waited == 1
    assert work.asked <= 1
