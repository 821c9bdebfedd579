"""The process behind `measuring.Worker`: one device, programs in, times out.

Started with one JSON argument (device, cores, memory); reads one JSON request a line and writes
one JSON answer a line. The environment was set by the parent; cores and memory are set here,
before torch is imported.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Mapping
from resource import RUSAGE_SELF, getrusage
from typing import Any

from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.timing.freed_memory import keep_freed_memory
from foreplan.datasets.timing.measurement import Measurement, thin
from foreplan.datasets.timing.worker_environment import confine, end_with_parent, thread_count
from foreplan.errors import ForeplanError, MissingDataError

#: A sample covers at least this much time, so that reading the clock does not show.
_SAMPLE_S = {"cpu": 1e-4, "cuda": 1e-3}
#: Calls in one CUDA graph at most: recording one takes the host about 20 us.
_MOST_RECORDED = 2048
#: Calls whose issuing is timed, times over, and the longest call of which it is (chosen): of longer
#: ones the host waits for the GPU, or is done long before.
_ISSUED, _ISSUES, _LONGEST_ISSUED_S = 8, 5, 2e-3
_WARM_CALLS = 3
_WARM_S = 0.02  # a call as long as this needs no second one to be warm


class _Device:
    """Torch set up as the device: threads, or GPU, slice, stream and memory share."""

    def __init__(self, device: DeviceName, memory_bytes: int | None) -> None:
        import torch

        self.torch = torch
        self.name = device
        self.one_thread = device.kind == "cpu" and thread_count(device) == 1
        self.preempted = 0
        self.wall_s = 0.0
        if device.kind == "cpu":
            self.word = "cpu"
            torch.set_num_threads(thread_count(device))
            torch.set_num_interop_threads(1)
            self.stream: Any = None
            return
        self.word = f"cuda:{device.index}"
        seen = torch.cuda.device_count()
        if (device.index or 0) >= seen:
            raise MissingDataError(f"torch {torch.__version__} sees {seen} GPUs here")
        torch.cuda.set_device(device.index or 0)
        if memory_bytes is not None:
            total = torch.cuda.get_device_properties(self.word).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, memory_bytes / total))
        if device.sms is not None:
            from torch.cuda.green_contexts import GreenContext

            torch.zeros(1, device=self.word)  # the primary context must exist first
            # Kept for the life of the process: the slice ends with its context.
            context: Any = GreenContext.create(num_sms=device.sms, device_id=device.index or 0)
            self.context = context
            context.set_context()
            # A plain torch stream can belong to the whole GPU; this one is the slice's own.
            self.stream = context.Stream()
        else:
            made: Any = torch.cuda.Stream  # untyped
            self.stream = made()
        # Gradients can only be recorded on the stream of their forward pass, and not on torch's
        # first.
        torch.cuda.set_stream(self.stream)

    # -------------------------------------------------------------------------------- timing

    def time_calls(self, call: Callable[[], object], count: int) -> float:
        """Seconds a call takes when ``count`` run back to back.

        When the scheduler gave the core of a one-thread device to another process meanwhile, the
        time on the core counts instead of the time on the wall, and `preempted` goes up.
        """
        if self.word == "cpu":
            switches = getrusage(RUSAGE_SELF).ru_nivcsw
            worked, started = time.process_time(), time.perf_counter()
            for _ in range(count):
                call()
            seconds = time.perf_counter() - started
            self.wall_s += seconds
            worked = time.process_time() - worked
            if getrusage(RUSAGE_SELF).ru_nivcsw != switches:
                self.preempted += 1
                if self.one_thread:
                    seconds = min(seconds, worked)
            return seconds / count
        torch = self.torch
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        for _ in range(count):
            call()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3 / count

    def recorded(self, call: Callable[[], object], count: int) -> Any:
        """A CUDA graph of ``count`` calls, or ``None`` of what cannot be recorded."""
        from foreplan.datasets.timing.graph_timer import record

        try:
            # A thread of autograd's own would record elsewhere.
            with self.torch.autograd.set_multithreading_enabled(False):
                return record([call] * count, self.stream)
        except RuntimeError:
            self.torch.cuda.synchronize()
            return None

    def time_replay(self, graph: Any, count: int) -> float:
        """Seconds of one of the ``count`` calls of a graph.

        A first replay keeps the GPU busy while the host queues the timed one, whose launch then
        does not count.
        """
        from foreplan.datasets.timing.graph_timer import busy_seconds

        return busy_seconds(graph.replay, graph.replay) / count

    def issue_s(self, call: Callable[[], object]) -> float:
        """Seconds that the host takes to issue a call to a GPU that has nothing else to do."""
        found = []
        for _ in range(_ISSUES):
            self.torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(_ISSUED):
                call()
            found.append((time.perf_counter() - started) / _ISSUED)
        self.torch.cuda.synchronize()
        return sorted(found)[_ISSUES // 2]

    def clock_hz(self) -> float | None:
        """Clock right now, where the machine tells it."""
        with contextlib.suppress(Exception):  # NVML missing, a virtual machine without clocks
            if self.word != "cpu":
                return float(self.torch.cuda.clock_rate(self.word)) * 1e6
            import psutil

            clock = psutil.cpu_freq()
            return None if clock is None or not clock.current else float(clock.current) * 1e6
        return None

    def measure(
        self, call: Callable[[], object], effort: Mapping[str, Any], turns: int | None,
        before: Callable[[], object] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Warm up and time adaptively; see `foreplan.datasets.timing.measuring.Effort`.

        Args:
            call: runs the program once.
            effort: how long to time it.
            turns: calls until the same inputs come back. On a GPU calls are replayed from a CUDA
                graph, without what the host needs to issue them, which is timed apart. ``None``
                issues each call.
            before: runs before each call that is timed; calls are timed one by one then.
        """
        from foreplan.datasets.kernels.cold_operands import InTurn

        if isinstance(call, InTurn):
            # Training programs: recorded by autograd, on a CPU each call behind other operators.
            behind = call.displace if self.word == "cpu" else None
            with self.torch.inference_mode(False), self.torch.enable_grad():
                return self._measure(call, effort, turns, behind)
        return self._measure(call, effort, turns, before)

    def _measure(
        self, call: Callable[[], object], effort: Mapping[str, Any], turns: int | None,
        before: Callable[[], object] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        max_s = float(effort["max_s"])
        first = self.time_calls(call, 1)
        if first > max_s:  # a slow program, or a library that loads at its first call
            first = self.time_calls(call, 1)
            if first > max_s:
                return {"times_s": [first], "mean_s": first, "samples": 1, "calls": 1}
        for _ in range(_WARM_CALLS - 1):
            if first < _WARM_S:
                first = min(first, self.time_calls(call, 1))
        count = max(1, math.ceil(_SAMPLE_S["cpu" if self.word == "cpu" else "cuda"] / first))
        count = 1 if before is not None else count
        graph = None
        if turns is not None and self.word != "cpu":
            # All copies of a weight take part, so that a replay finds none of them in the cache.
            count = min(max(count, turns), _MOST_RECORDED)
            graph = self.recorded(call, count)
        times: list[float] = []
        self.preempted, self.wall_s = 0, 0.0
        started = time.perf_counter()
        gc.disable()
        try:
            while True:
                if before is not None:
                    before()
                times.append(
                    self.time_calls(call, count)
                    if graph is None
                    else self.time_replay(graph, count)
                )
                spent = time.perf_counter() - started
                enough = len(times) >= effort["min_samples"] and spent >= effort["min_s"]
                if enough or spent >= max_s or len(times) >= effort["max_samples"]:
                    break
        finally:
            gc.enable()
        issued = self.word != "cpu" and first <= _LONGEST_ISSUED_S
        total_s = self.wall_s / count if self.word == "cpu" else sum(times)
        return {
            "times_s": thin(times),
            "mean_s": total_s / len(times),
            "samples": len(times),
            "calls": count,
            "preempted": self.preempted,
            **({"issue_s": self.issue_s(call)} if issued else {}),
            **({} if graph is None else {"how": "; replayed from a CUDA graph"}),
        }


def _switch(device: _Device) -> dict[str, float]:
    """What a program takes longer behind another than behind itself; {} if that cannot be told.

    Its code, constants and weights are then no longer where its last call left them, but what it
    reads was written just before. The programs are those of a decoder layer for 8 sequences at 512
    positions, each as it is profiled and all in turn, on activations that they share: with inputs
    of their own, out of the caches by then, they lose twice as much as in passes of a decoder
    (measured on an H200, docs/results/h200.md).
    """
    from foreplan.datasets.kernels.runnable import Inputs
    from foreplan.datasets.models.decoder_programs import layer_programs
    from foreplan.datasets.models.model_zoo import zoo_model

    kernels = {"linear": "bf16/bf16/torch.linear", "attention": "bf16/bf16/torch.sdpa"}
    counts = layer_programs(
        zoo_model("llama-3.2-3b"), 8, 1, 512, lambda op, _: Variant.parse(kernels[op])
    )

    def seconds(calls: list[Callable[[], object]], times: int) -> float:
        graph = device.recorded(lambda: [call() for call in calls], times)
        if graph is None:
            raise RuntimeError("not recorded")
        return sorted(device.time_replay(graph, times) for _ in range(9))[4]

    with contextlib.suppress(RuntimeError):  # a capped memory is too small for it
        inputs = Inputs(device.word, behind_one_another=True)
        made = [(inputs.runnable(item), count) for item, count in counts]
        alone = sum(seconds([r.call], min(max(r.turns or 1, 32), 256)) * c for r, c in made)
        together = seconds([r.call for r, count in made for _ in range(count)], 32)
        extra = (together - alone) / sum(count for _, count in made)
        return {"switch_s": extra} if extra > 0 else {}
    return {}


def _serve(device: _Device, requests: Any, answer: Callable[[object], None]) -> None:
    from foreplan.datasets.kernels.runnable import Inputs, Runnable
    from foreplan.datasets.timing._device_figures import figures
    from foreplan.datasets.timing._pass_timing import PassTimer

    inputs = Inputs(device.word)
    passes = PassTimer(device, Inputs(device.word))
    kept: dict[Program, Runnable] = {}
    for line in requests:
        request = json.loads(line)
        if request.get("figures"):
            inputs.release()
            found = figures(device.word, device.time_calls)
            answer(found if device.word == "cpu" else found | _switch(device))
            continue
        if "pass" in request:
            answer(passes.answer(request))
            continue
        result: dict[str, Any] = {"load": os.getloadavg()[0]}
        try:
            variant = Variant.parse(request["variant"])
            wanted = program(request["op"], variant, **request["dims"])
            made = kept.get(wanted) or inputs.runnable(wanted)
            if request["keep"]:
                kept[wanted] = made
            result |= device.measure(made.call, request["effort"], made.turns, made.before)
            result["cache_state"] = made.cache_state + result.pop("how", "")
            result["clock_hz"] = device.clock_hz()
            del made
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            # A failed kernel can leave a CUDA context unusable: the next program gets a new one.
            result |= {"times_s": [], "samples": 0, "error": Measurement.failed(text).error}
            result["fatal"] = device.word != "cpu"
            inputs.release()
        answer(result)


def main() -> None:
    """Run the worker; see the module."""
    settings = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    end_with_parent(settings["parent"])
    # Answers have a descriptor of their own; what libraries print goes to the log.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(value: object) -> None:
        try:
            print(json.dumps(value), file=channel, flush=True)
        except BrokenPipeError:
            os._exit(1)

    try:
        name = DeviceName.parse(settings["device"])
        memory = settings["memory_bytes"]
        confine(settings["cores"], memory if name.kind == "cpu" else None)
        if name.kind == "cpu":
            keep_freed_memory()
        device = _Device(name, memory)
        from foreplan.datasets.timing._device_figures import identity

        answer(identity(name, device.word))
    except Exception as error:
        ours = isinstance(error, ForeplanError)
        text = str(error) if ours else f"{type(error).__name__}: {error}"
        answer({"error": Measurement.failed(text).error})
        return
    with device.torch.inference_mode():
        _serve(device, sys.stdin, answer)


if __name__ == "__main__":
    assert platform.system() == "Linux", "affinity and memory caps are Linux calls"
    main()
