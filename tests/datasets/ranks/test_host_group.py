"""Real processes that share memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

#: Joins the default group, opens one of ours, does what the test says, and prints what it says.
RANK = """
import json, os, sys, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from foreplan.datasets.ranks import host_group
from foreplan.datasets.ranks.host_group import HostGroup
rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world,
                        timeout=timedelta(seconds=300))
gloo = dist.new_group(list(range(world)))
def open_group(timeout_s=300.0):
    return HostGroup.open(list(range(world)), gloo, timeout_s)
said = None
{body}
print(json.dumps(said), flush=True)
os._exit(0)  # gloo's threads must not outlive the interpreter
"""


def run(body: str, world: int, tmp_path: Path) -> list[Any]:
    """What each rank says."""
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    script = RANK.replace("{body}", body)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), str(world), str(tmp_path / "store")],
            env=environment, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=600)[0].strip() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads(text) if text else None for text in said]


SUMS = """
group = open_group()
piece = host_group._PIECE_BYTES
for dtype, count in ((torch.bfloat16, 3072), (torch.float32, piece // 4 + 1), (torch.float64, 7)):
    for turn in range(3):
        each = [torch.randn(count, generator=torch.Generator().manual_seed(10 * turn + r)).to(dtype)
                for r in range(world)]
        expected = each[0].clone()
        for other in each[1:]:
            expected += other
        mine = each[rank].view(-1, 1).clone()
        group.all_reduce(mine)
        assert torch.equal(mine.flatten(), expected), (dtype, turn)
        every = torch.zeros(world, count, dtype=dtype)
        every[rank] = each[rank]
        group.all_gather(every)
        assert torch.equal(every, torch.stack(each)), (dtype, turn)
said = "equal"
"""


LATE = """
import socket
connect = socket.socket.connect
def late(self, address):
    if rank == 2 and str(address).endswith("/1"):
        time.sleep(1.0)
    connect(self, address)
socket.socket.connect = late
said = open_group() is not None
"""


def test_a_rank_that_calls_late_finds_the_others(tmp_path: Path) -> None:
    # The first rank has heard from all by then, and must not have removed where they meet.
    assert run(LATE, 3, tmp_path) == [True] * 3


@pytest.mark.parametrize("world", [2, 3])
def test_sums_and_gathers_are_everybodys_to_the_bit(world: int, tmp_path: Path) -> None:
    assert run(SUMS, world, tmp_path) == ["equal"] * world


LOST = """
group = open_group()
x = torch.ones(8)
group.all_reduce(x)
if rank == 1:
    time.sleep(0.1)  # the other one sleeps by then
    os._exit(0)
try:
    group.all_reduce(x)
except RuntimeError as error:
    said = str(error)
"""


def test_a_lost_rank_is_an_error_at_once(tmp_path: Path) -> None:
    first, second = run(LOST, 2, tmp_path)
    assert "gone" in first
    assert second is None


SILENT = """
group = open_group(1.0)
if rank == 0:
    try:
        group.all_reduce(torch.ones(8))
    except RuntimeError as error:
        said = str(error)
dist.barrier()
"""


def test_a_silent_rank_is_an_error_in_time(tmp_path: Path) -> None:
    assert run(SILENT, 2, tmp_path) == ["rank 1 of the group did not come within 1 s", None]


ELSEWHERE = """
if rank == {rank}:
    {fault}
said = open_group() is None
"""
FAULTS = {
    "no room for the memory": (0, "host_group._folder = lambda ranks: _full()"),
    "the folder is not here": (1, "host_group.Path = lambda name: Path('/nonexistent')"),
    "the memory cannot be mapped": (1, "torch.from_file = lambda *a, **k: _full()"),
}
FULL = """
def _full():
    raise OSError(28, "No space left on device")
"""


@pytest.mark.parametrize("fault", FAULTS)
def test_nobody_gets_a_group_where_one_cannot_share(fault: str, tmp_path: Path) -> None:
    rank, act = FAULTS[fault]
    body = FULL + ELSEWHERE.replace("{rank}", str(rank)).replace("{fault}", act)
    assert run(body, 2, tmp_path) == [True, True]


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    def folders() -> Sequence[str]:
        return sorted(str(path) for path in tmp_path.glob("foreplan-sums-*"))

    body = f"""
made = host_group.tempfile.mkdtemp
host_group.tempfile.mkdtemp = lambda prefix, dir: made(prefix=prefix, dir={str(tmp_path)!r})
group = open_group()
group.all_reduce(torch.ones(8))
said = True
"""
    assert run(body, 2, tmp_path) == [True, True]
    assert not folders()
