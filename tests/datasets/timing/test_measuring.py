from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.kernels.runnable import Runnable, runnable
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.timing import _measuring_worker
from foreplan.datasets.timing._measuring_worker import _Device, _serve
from foreplan.datasets.timing.measurement import KEPT, Measurement, percentiles, thin
from foreplan.datasets.timing.measuring import Effort, Worker
from foreplan.datasets.timing.worker_environment import default_cores, worker_environment
from foreplan.errors import MissingDataError, SpecError

ADD = program("add", Variant("bf16", "bf16", "torch.add"), rows=4, cols=64)
QUICK = Effort(min_s=0.0, min_samples=3, max_s=0.1, timeout_s=30.0)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(DeviceName.parse("cpu:threads=1,isa=avx2")) as made:
        yield made


def test_worker_is_the_device_it_should_be(worker: Worker) -> None:
    assert worker.identity["units"] == 1
    assert "avx512" not in worker.identity["isa"]
    assert len(worker.cores) == 1
    assert worker.identity["software"]["torch"]


def test_measures_a_program(worker: Worker) -> None:
    result = worker.measure(ADD, QUICK)
    assert result.error is None
    assert result.samples >= 3
    assert list(result.times_s) == sorted(result.times_s)
    assert 1e-7 < result.median_s < 1e-2
    assert result.cache_state == "warm; behind a cold product of 8.25 MiB"


def test_a_program_that_is_kept_is_timed_again_on_the_same_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Program] = []
    timed: list[object] = []

    class Once:
        def __init__(self, device: str) -> None:
            pass

        def runnable(self, item: Program) -> Runnable:
            made.append(item)
            return Runnable(lambda: None, "warm")

    def measure(call: object, *_: object) -> dict[str, Any]:
        timed.append(call)
        return {"times_s": [1.0], "samples": 1}

    monkeypatch.setattr("foreplan.datasets.kernels.runnable.Inputs", Once)
    device: Any = SimpleNamespace(word="cpu", measure=measure, clock_hz=lambda: None)
    asked = {"op": ADD.op, "dims": ADD.dims, "variant": str(ADD.variant), "effort": {}}
    requests = [json.dumps({**asked, "keep": keep}) for keep in (False, True, True, False)]
    answers: list[Any] = []
    _serve(device, requests, answers.append)
    assert [answer.get("error") for answer in answers] == [None] * 4
    assert made == [ADD, ADD]
    assert timed[1] is timed[2] is timed[3] is not timed[0]


def test_the_mean_counts_what_another_process_took(monkeypatch: pytest.MonkeyPatch) -> None:
    switches = itertools.count()
    usage = lambda who: SimpleNamespace(ru_nivcsw=next(switches))  # noqa: E731
    monkeypatch.setattr(_measuring_worker, "getrusage", usage)
    device = _Device.__new__(_Device)
    device.torch, device.word, device.one_thread, device.preempted = torch, "cpu", True, 0
    device.wall_s = 0.0
    effort = {"min_s": 0.0, "min_samples": 3, "max_s": 9.0, "max_samples": 3}
    timed = device.measure(lambda: time.sleep(0.002), effort, 1)
    assert timed["preempted"] == timed["samples"] == 3
    assert timed["times_s"][-1] < 0.002 <= timed["mean_s"]


def test_a_slow_program_is_timed_by_its_second_call(worker: Worker) -> None:
    slow = program("add", ADD.variant, rows=2048, cols=2048)
    result = worker.measure(slow, Effort(min_s=0.0, max_s=1e-6))
    assert result.samples == 1
    assert result.error is None


def test_weights_are_streamed_from_memory(worker: Worker) -> None:
    linear = program("linear", Variant("bf16", "bf16", "torch.linear"), rows=1, n=512, k=512)
    assert "weight cold" in worker.measure(linear, QUICK).cache_state


def test_what_is_no_product_comes_behind_one_on_a_processor(worker: Worker) -> None:
    made = {
        op: runnable(program(op, Variant.parse(f"bf16/bf16/torch.{kernel}"), **dims), "cpu")
        for op, kernel, dims in (
            ("norm", "rms_norm", {"rows": 2, "cols": 64}),
            ("argmax", "argmax", {"rows": 2, "cols": 64}),
            ("linear", "linear", {"rows": 2, "n": 64, "k": 64}),
        )
    }  # fmt: skip
    assert made["norm"].before is not None
    assert made["argmax"].before is not None
    assert made["linear"].before is None, "its weight is cold already"
    assert made["norm"].cache_state.endswith("behind a cold product of 8.25 MiB")
    calls = 0

    def before() -> None:
        nonlocal calls
        calls += 1

    device = _Device.__new__(_Device)  # torch's threads are this process's own business
    device.torch, device.word, device.one_thread, device.preempted = torch, "cpu", False, 0
    device.wall_s = 0.0
    timed = device.measure(
        made["norm"].call, {"min_s": 0.0, "min_samples": 5, "max_s": 9.0, "max_samples": 5}, 1,
        before,
    )  # fmt: skip
    assert timed["calls"] == 1
    assert timed["samples"] == calls == 5


def test_a_failing_kernel_is_a_result(worker: Worker) -> None:
    unknown = Program("add", (1, 1), Variant("bf16", "bf16", "torch.nothing"))
    result = worker.measure(unknown, QUICK)
    assert "torch.nothing" in str(result.error)
    assert worker.measure(ADD, QUICK).error is None


def test_a_crash_is_a_result_and_the_next_program_runs(worker: Worker) -> None:
    process = worker._child
    assert process is not None
    slow = program("add", ADD.variant, rows=4096, cols=4096)
    worker.send_program(slow, Effort(min_s=20.0, max_s=20.0))
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGSEGV)
    result = worker.receive_measurement(QUICK)
    assert "SIGSEGV" in str(result.error)
    assert worker.measure(ADD, QUICK).error is None


def test_a_time_out_is_a_result_and_leaves_no_process(worker: Worker) -> None:
    process = worker._child
    assert process is not None
    slow = Effort(min_s=20.0, max_s=20.0, timeout_s=0.2)
    result = worker.measure(program("add", ADD.variant, rows=4096, cols=4096), slow)
    assert result.error == "no answer within 0.2 s"
    assert not process.running
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    assert worker.measure(ADD, QUICK).error is None


def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import os, signal\n"
        "from foreplan.datasets.timing.measuring import Worker\n"
        "from foreplan.datasets.device_name import DeviceName\n"
        "worker = Worker(DeviceName.parse('cpu:threads=1')).__enter__()\n"
        "print(worker._child.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, check=False
    )
    pid = int(done.stdout)
    for _ in range(100):
        try:
            if "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1]:
                return
        except OSError:
            return
        time.sleep(0.05)
    pytest.fail("the worker outlived its parent")


def test_memory_cap_fails_allocations_and_nothing_else() -> None:
    with Worker(DeviceName.parse("cpu:threads=1"), memory_bytes=1 << 30) as worker:
        big = program("add", ADD.variant, rows=1 << 16, cols=1 << 14)
        assert worker.measure(big, QUICK).error is not None
        assert worker.measure(ADD, QUICK).error is None


def test_no_gpu_is_missing_data() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(MissingDataError, match="cannot measure"):
        Worker(DeviceName.parse("cuda:0")).__enter__()


def test_environment_sets_the_instruction_set_and_forgets_others() -> None:
    base = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "DNNL_MAX_CPU_ISA": "SSE41", "HOME": "h"}
    found = worker_environment(DeviceName.parse("cpu:threads=2,isa=avx2"), base=base)
    assert found == {
        "HOME": "h",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "OMP_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2",
    }
    plain = worker_environment(DeviceName.parse("cpu:threads=1"), base=base)
    assert "ONEDNN_MAX_CPU_ISA" not in plain
    with pytest.raises(SpecError, match="t4"):
        worker_environment(DeviceName.parse("t4"))
    gpu = worker_environment(DeviceName.parse("cuda:0"), base={})
    assert gpu == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "32", "NCCL_GRAPH_MIXING_SUPPORT": "0",
        "NCCL_GRAPH_REGISTER": "0",
    }  # fmt: skip
    asked = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert worker_environment(DeviceName.parse("cuda:0"), base=asked) == gpu | asked
    with pytest.raises(SpecError, match="threads"):
        default_cores(DeviceName.parse("cpu:threads=9999"))


def test_percentiles_count_every_round_the_same() -> None:
    first = Measurement(thin([1.0] * 1000), 1000)
    second = Measurement((3.0, 3.0), 2)
    assert len(first.times_s) == KEPT
    low, median, high = percentiles([first, second])
    assert (low, high) == (1.0, 3.0)
    assert 1.0 <= median <= 3.0
    assert percentiles([Measurement((2.0,), 1)]) == (2.0, 2.0, 2.0)
