from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from foreplan.datasets.cluster import Cluster
from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.specs import validate
from foreplan.errors import SpecError
from foreplan.planner.verify import placement
from foreplan.planner.verify.local import describe_exit, rank_environment
from foreplan.planner.verify.placement import assign_cores, check_present

PATHS = os.pathsep.join([str(Path(__file__).parents[3] / "src"), *filter(None, sys.path)])


def names(*words: str) -> list[DeviceName]:
    return [DeviceName.parse(word) for word in words]


def test_workers_of_a_host_get_cores_of_their_own() -> None:
    devices = names("cpu:threads=2", "cpu:threads=1,isa=avx2", "cuda:0")
    assert assign_cores(devices, range(4)) == ((0, 1), (2,), (3,))
    assert assign_cores(names("cpu:threads=1", "cpu"), [3, 5, 7]) == ((3,), (5, 7))
    assert assign_cores(names("cuda:0"), [0]) == ((0,),)
    assert assign_cores(names("cpu:threads=1", "cuda:0"), [0]) == ((0,), ())


def test_more_threads_than_cores_is_refused() -> None:
    for words in (("cpu:threads=2", "cpu:threads=1"), ("cpu", "cpu")):
        with pytest.raises(SpecError, match=r"this process has 2 cores; say threads=1 for each"):
            assign_cores(names(*words), [0, 1])
    with pytest.raises(SpecError, match=r"this process has 1 cores; allow it more \(taskset"):
        assign_cores(names("cpu:threads=1", "cpu:threads=1,isa=avx2"), [0])


def test_devices_that_are_not_here_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_cpu_flags", lambda: frozenset({"avx2", "fma"}))
    check_present(DeviceName.parse("cpu:threads=1,isa=avx2"))
    with pytest.raises(SpecError, match="no avx512_bf16, avx512bw"):
        check_present(DeviceName.parse("cpu:isa=avx512_bf16"), "host/cpu")
    with pytest.raises(SpecError, match="published figures only"):
        check_present(DeviceName.parse("t4"))
    with pytest.raises(SpecError, match="at most threads="):
        check_present(DeviceName.parse("cpu:threads=9999"))


def test_the_environment_of_a_rank() -> None:
    cluster = validate(Cluster, {"devices": [{"name": "cpu:threads=1,isa=avx2"}]}, "cluster")
    found = rank_environment(cluster.ranks()[0], "word", base={"ONEDNN_MAX_CPU_ISA": "SSE41"})
    assert found["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert found["OMP_NUM_THREADS"] == "1"
    assert found["OPENBLAS_NUM_THREADS"] == "1"


def test_a_memory_cap_counts_from_what_the_process_holds() -> None:
    code = """
from foreplan.datasets.device_name import DeviceName
from foreplan.planner.verify.placement import cap_memory, lift_cap, take_seat
seat = take_seat(DeviceName.parse("cpu:threads=1"), ())
import torch
before = torch.zeros(100 << 20, dtype=torch.uint8)
cap_memory(seat, 64 << 20)
held = torch.zeros(64 << 20, dtype=torch.uint8)
try:
    torch.zeros(64 << 20, dtype=torch.uint8)
except RuntimeError as error:
    print("refused", "allocate memory" in str(error))
lift_cap()
torch.zeros(64 << 20, dtype=torch.uint8)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": PATHS},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "refused True", done.stderr
    assert done.returncode == 0, done.stderr


def test_how_a_process_ended_is_said() -> None:
    assert describe_exit(3) == "it exited with code 3"
    assert "SIGKILL" in describe_exit(-9)
    assert "cap" in describe_exit(-6)
