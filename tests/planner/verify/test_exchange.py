"""Processes that tell each other something, and one that ends right afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.timing.worker_environment import worker_environment

SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
from foreplan.planner.verify.exchange import exchange, gather

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
rank = int(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
held = set()
for step in range(300):
    mine = torch.tensor([rank + step])
    before = sys.getrefcount(mine)
    everyone = gather(mine)
    held.add(sys.getrefcount(mine) - before)
    assert [int(value) for value in everyone] == [step, step + 1]
print(json.dumps([sorted(held), exchange({"rank": rank, "long": "x" * rank})]))
"""


def test_everyone_is_told_and_nothing_is_held_when_it_is_over(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path / "store"), str(rank)],
            env=worker_environment(DeviceName.parse("cpu:threads=1")),
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "gloo aborts what ends too soon"
    told = [{"rank": 0, "long": ""}, {"rank": 1, "long": "x"}]
    # A thread of gloo that still held the tensor would count as one more.
    assert [json.loads(line) for line in said] == [[[0], told]] * 2
