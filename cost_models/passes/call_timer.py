"""`CallTimer`: times single ATen calls as a network makes them, each alone. Imports torch.

A call gets tensors of its own (`call_operands`). Three times are taken: of the call without
gradients, of the call that records for them, and of its gradients; each on the device and, on a
GPU, also on the host.

On a GPU calls are queued behind a kernel that only waits, so that the device runs them back to
back and the host's time to issue them does not show; below some 2 us of work the queue decides all
the same. For passes that run as CUDA graphs a call is recorded, gradients too, as often as its
operands come in turn, and the graph replayed. On a CPU with one thread the clock is the thread's
own.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from foreplan.cost_models.passes.call_operands import MOST_COPIES, CallKey, CallOperands
from foreplan.cost_models.passes.call_values import byte_count, bytes_of, with_gradients
from foreplan.datasets.timing.graph_timer import call_seconds

#: Dtypes that a network can be run in.
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
#: How a call is timed.
MODES = ("inference", "forward", "backward")

#: Samples of a GPU last about this long, and have so many calls (assumed).
_SAMPLE_S, _FEWEST, _MOST_CALLS = 0.005, 2, 20
#: Bytes that pass through a CPU's caches before each call: what a core has for itself. In a loop of
#: one call ConvNeXt's gradients took a third less than in a step.
_DISPLACED = 1 << 20
#: Gradients that one pass of autograd computes, and a pass shorter than that has several.
_TOGETHER, _SHORT_S = 8, 2e-4
#: Spins of the kernel that waits in a second: a clock above any GPU's.
_SPINS = 2.2e9


class CallTimer:
    """Times calls on one torch device.

    Args:
        device: ``cpu`` or ``cuda:N``.
        seconds: spent on each time after warm-up.
    """

    def __init__(self, device: str, *, seconds: float = 0.05) -> None:
        self.device = device
        self.kind = torch.device(device).type
        self.seconds = seconds
        self._operands = CallOperands(device)
        self._idle: dict[tuple[int, int], tuple[float, float]] = {}
        self._displacements: dict[int, _Displacement] = {}
        self._stream: Any = None

    def time(self, key: CallKey, mode: str) -> tuple[float, float]:
        """Seconds of a call in one of `MODES`: on the device, and until it returns to the host.

        Raises:
            RuntimeError: it does not run on tensors of its own.
        """
        with _gradient_mode(mode):
            call, turns, together, near = self._made(key, mode)
            before = self._before(key.code_age, near)
            device_s, host_s = self._seconds(call, turns, together, before)
            if mode != "backward":
                return device_s, host_s
            idle = self._idle_pass(together, key.code_age)
            return (
                max(0.0, device_s - (idle[0] if self.kind == "cpu" else 0.0)) / together,
                max(0.0, host_s - idle[1]) / together,
            )

    def graph_time(self, key: CallKey, mode: str) -> float:
        """Seconds of a call in one of `MODES` inside a CUDA graph, behind calls of its own kind.

        Raises:
            RuntimeError: it does not run, or cannot be recorded.
        """
        with self._recording(), _gradient_mode(mode):
            call, turns, *_ = self._made(key, mode, recorded=True)
            return self._replayed(call, turns)

    def time_update(
        self, shapes: Sequence[Sequence[int]], dtype: str, backward_bytes: int = 0
    ) -> tuple[float, float]:
        """Seconds of an update by fused AdamW, gradients then dropped: on the device, and the host.

        Args:
            shapes: of the parameters.
            dtype: of them.
            backward_bytes: moved since their gradients began to be made.
        """
        optimizer, grow = self._optimizer(shapes, dtype, capturable=False)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        if self.kind == "cuda":
            return self._seconds(optimizer.step, 1)
        # Giving the gradients' memory back takes as long as it takes in a step.
        now, times = clock(self.device), list[float]()
        other = _Displacement(min(backward_bytes, 2 * self._operands.cache_bytes))
        for _ in range(7):
            grow()
            other()
            started = now()
            update()
            times.append(now() - started)
        found = sorted(times[1:])[3]
        return found, found

    def graph_update(self, shapes: Sequence[Sequence[int]], dtype: str) -> float:
        """Seconds of an update by fused AdamW inside a CUDA graph.

        Args:
            shapes: of the parameters.
            dtype: of them.

        Raises:
            RuntimeError: it cannot be recorded.
        """
        with self._recording():
            optimizer, _ = self._optimizer(shapes, dtype, capturable=True)
            return self._replayed(optimizer.step, 1)

    # ------------------------------------------------------------------------------- operands

    def _optimizer(
        self, shapes: Sequence[Sequence[int]], dtype: str, *, capturable: bool
    ) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
        """An optimizer whose parameters have gradients, and what makes these anew."""
        made = getattr(torch, dtype)
        tensors = [
            torch.nn.Parameter(torch.rand(list(shape), device=self.device).to(made))
            for shape in shapes
        ]

        def grow() -> None:
            for tensor in tensors:
                # Of zeros an H200's update takes half as long again (end_to_end.md).
                tensor.grad = torch.randn_like(tensor)

        grow()
        return torch.optim.AdamW(tensors, lr=1e-6, fused=True, capturable=capturable), grow

    def _made(
        self, key: CallKey, mode: str, *, recorded: bool = False
    ) -> tuple[Callable[[], object], int, int, list[torch.Tensor]]:
        """A call on operands in turn, how many turns, calls in each, and operands that are near."""
        if mode == "backward":
            return self._gradients(key, recorded=recorded)
        run, sets, results, near = self._operands.calls(key, keep=mode == "forward")
        turn = itertools.cycle(sets)

        def call() -> None:
            made = run(next(turn))
            if results:
                results.append(made)
                results.popleft()

        return call, len(sets), 1, near

    # ------------------------------------------------------------------------------ gradients

    def _gradients(
        self, key: CallKey, *, recorded: bool
    ) -> tuple[Callable[[], object], int, int, list[torch.Tensor]]:
        """Several calls' gradients in one pass of autograd; one's where it is recorded.

        One's, too, where the age of its code counts: the second would find it near.
        """
        aged = key._replace(ages=(key.backward_bytes,) * len(key.gradients))
        run, sets, *_ = self._operands.calls(aged, keep=True, least=_TOGETHER)
        made = [with_gradients(run(given)) for given in sets]
        leaves = [with_gradients(given) for given in sets]
        held = [p for p, wanted in zip(key.parameters, key.gradients, strict=True) if wanted]
        size = sum(byte_count(t) for t, parameter in zip(leaves[0], held, strict=True) if parameter)
        # The operators behind have just written it; ones would be quicker to multiply by.
        seeds = [torch.randn_like(t) for t in made[0]]
        count = 1
        kept: deque[Any] = deque(maxlen=1)

        def several(turn: Iterable[int]) -> Callable[[], object]:
            chosen = list(turn)
            outs = [t for i in chosen for t in made[i]]
            ins = [t for i in chosen for t in leaves[i]]
            keeps = held * len(chosen)

            def grads() -> None:
                found = torch.autograd.grad(
                    outs, ins, seeds * len(chosen), retain_graph=True, allow_unused=True
                )
                if size:
                    kept.append([g for g, keep in zip(found, keeps, strict=True) if keep])

            return grads

        alone = several([0])
        alone()
        if not recorded and not key.code_age and self._once(alone) < _SHORT_S:
            # What stands twice in a pass is computed once.
            count = min(_TOGETHER, len(made))
        most = -(-2 * self._operands.cache_bytes // max(1, size * count)) if size else 1
        kept = deque(maxlen=min(MOST_COPIES, most))
        groups = [
            several(turn % len(made) for turn in range(first, first + count))
            for first in range(0, len(made), count)
        ]
        turn = itertools.cycle(groups)
        # Memory for what is kept has been had from the system before anything counts.
        for _ in range(min(MOST_COPIES, most)):
            next(turn)()
        return (lambda: next(turn)()), len(groups), count, seeds

    def _idle_pass(self, count: int, code_age: int) -> tuple[float, float]:
        """Seconds of a pass of autograd that has next to nothing to do."""
        if (count, code_age) not in self._idle:
            leaves = [torch.ones(8, device=self.device).requires_grad_() for _ in range(count)]
            outs = [leaf.view(2, 4) for leaf in leaves]
            seeds = [torch.ones_like(out) for out in outs]
            self._idle[count, code_age] = self._seconds(
                lambda: torch.autograd.grad(outs, leaves, seeds, retain_graph=True),
                1, 1, self._before(code_age, seeds),
            )  # fmt: skip
        return self._idle[count, code_age]

    # --------------------------------------------------------------------------------- timing

    def _once(self, call: Callable[[], object]) -> float:
        self._wait()
        started = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def _before(self, code_age: int, near: Sequence[torch.Tensor]) -> Callable[[], object]:
        """On a CPU, what passes through its caches before each call.

        As much as since a call of the kind was last made, whose code waits in the caches like any
        operand; what has been used since is read again, and behind it comes what always does.
        """
        if self.kind != "cpu":
            return lambda: None
        last = _Displacement(_DISPLACED)
        if code_age <= _DISPLACED:
            return last
        size = min(code_age, 2 * self._operands.cache_bytes) - _DISPLACED
        if size not in self._displacements:
            self._displacements = {size: _Displacement(size)}
        other, read = self._displacements[size], [bytes_of(tensor) for tensor in near]

        def before() -> None:
            other()
            for part in read:
                part.max()
            last()

        return before

    def _seconds(
        self, call: Callable[[], object], turns: int, together: int = 1,
        before: Callable[[], object] = lambda: None,
    ) -> tuple[float, float]:  # fmt: skip
        call()
        enabled = gc.isenabled()
        gc.disable()
        try:
            return (
                self._on_gpu(call, together)
                if self.kind == "cuda"
                else self._on_cpu(call, turns, before)
            )
        finally:
            if enabled:
                gc.enable()

    def _on_cpu(
        self, call: Callable[[], object], turns: int, before: Callable[[], object]
    ) -> tuple[float, float]:
        now = clock(self.device)
        once = self._once(call)
        # All copies are used before anything counts.
        for _ in range(min(turns, math.ceil(0.3 * self.seconds / max(once, 1e-9)))):
            call()
        times: list[float] = []
        begun = time.perf_counter()
        while len(times) < 7 or (time.perf_counter() - begun < self.seconds and len(times) < 99):
            before()
            started = now()
            call()
            ended = now()
            times.append(2 * ended - started - now())  # less what reading the clock takes
        found = max(0.0, sorted(times)[len(times) // 2])
        return found, found

    def _on_gpu(self, call: Callable[[], object], together: int) -> tuple[float, float]:
        event: Any = torch.cuda.Event  # untyped
        idle: Any = torch.cuda._sleep
        start, stop = event(enable_timing=True), event(enable_timing=True)
        for _ in range(2):
            call()
        once = self._once(call)
        most = max(_FEWEST, _MOST_CALLS // together)
        count = max(_FEWEST, min(most, math.ceil(_SAMPLE_S / max(once, 1e-9))))
        started = time.perf_counter()
        call()
        wait_s = 1.5 * count * (time.perf_counter() - started) + 5e-5
        device, host = list[float](), list[float]()
        begun = time.perf_counter()
        while len(device) < 5 or (time.perf_counter() - begun < self.seconds and len(device) < 25):
            torch.cuda.synchronize()
            idle(int(_SPINS * min(wait_s, 0.05)))
            start.record()
            started = time.perf_counter()
            for _ in range(count):
                call()
            issued = time.perf_counter() - started
            stop.record()
            stop.synchronize()
            device.append(start.elapsed_time(stop) / 1e3 / count)
            host.append(issued / count)
            if issued > 0.8 * wait_s:  # the device may have waited for the host
                wait_s = 2.0 * issued
        return sorted(device)[len(device) // 2], sorted(host)[len(host) // 2]

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        """Work goes to a stream of its own: nodes of autograd belong to the one they were made on.

        Raises:
            RuntimeError: on a CPU.
        """
        if self.kind != "cuda":
            raise RuntimeError("CPUs have no CUDA graphs")
        made: Any = torch.cuda.Stream  # untyped
        self._stream = self._stream or made(self.device)
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def _replayed(self, call: Callable[[], object], turns: int) -> float:
        """Seconds of a call that is recorded in all turns of its operands."""
        return call_seconds([call] * turns, stream=self._stream, most_s=self.seconds)


class _Displacement:
    """On a CPU, what stands for the operators before a call: other code on other data."""

    def __init__(self, size_bytes: int) -> None:
        self._a, self._b = (torch.rand(max(1024, size_bytes // 8)) for _ in "ab")

    def __call__(self) -> None:
        torch.add(self._a, self._b, out=self._a)
        torch.tanh(self._b[:512])


@contextlib.contextmanager
def _gradient_mode(mode: str) -> Iterator[None]:
    """Autograd as a call in one of `MODES` has it."""
    with torch.inference_mode(mode == "inference"), torch.set_grad_enabled(mode != "inference"):
        yield


def clock(device: str) -> Callable[[], float]:
    """The clock to time a device by: time on the core for one thread of a CPU, else on the wall.

    A single thread that another process takes the core from did not work meanwhile.
    """
    alone = torch.device(device).type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if alone else time.perf_counter
