"""`CallTimer`: times single ATen calls as a network makes them, each alone. Imports torch.

A call gets tensors of its own, of the shapes, strides and dtypes that it has in the network. How
cold they are follows from the network as well: an operand that comes back after so many bytes have
been moved (its age) is held in as many copies as make the loop move as many between two uses of a
copy. Three times are taken: of the call without gradients, of the call that records for them, and
of its gradients; each on the device and, on a GPU, also on the host.

On a GPU calls are queued behind a kernel that only waits, so that the device runs them back to
back and the host's time to issue them does not show. On a CPU with one thread the clock is the
thread's own.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foreplan.cost_models.call_values import (
    byte_count,
    described_tensors,
    operator_of,
    with_gradients,
)
from foreplan.datasets.cold_operands import last_level_cache
from foreplan.datasets.operator_call import DEVICE, DTYPE, LAYOUT, MEMORY_FORMAT, TENSOR

#: Dtypes that a network can be run in.
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
#: How a call is timed.
MODES = ("inference", "forward", "backward")

#: Copies of an operand at most (assumed, as the sizes of samples below).
_MOST_COPIES = 128
#: Samples of a GPU last about this long, and have so many calls.
_SAMPLE_S, _FEWEST, _MOST_CALLS = 0.005, 2, 20
#: Bytes that pass through a CPU's caches before each call: what a core has for itself. In a loop of
#: one call ConvNeXt's gradients took a third less than in a step.
_DISPLACED = 1 << 20
#: Gradients that one pass of autograd computes, and a pass shorter than that has several.
_TOGETHER, _SHORT_S, _SMALL_BYTES = 8, 2e-4, 64 << 20
#: Spins of the kernel that waits in a second: a clock above any GPU's.
_SPINS = 2.2e9


class CallKey(NamedTuple):
    """A call as it is timed.

    Attributes:
        target: ``aten.conv2d.default``.
        arguments: as `OperatorCall.arguments`.
        gradients: whether each tensor among them has one.
        parameters: whether each is a parameter: its gradient is kept until the update.
        ages: bytes moved since each was last used.
        backward_bytes: moved between the forward call and its gradients.
    """

    target: str
    arguments: str
    gradients: tuple[bool, ...]
    parameters: tuple[bool, ...]
    ages: tuple[int, ...]
    backward_bytes: int


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
        self._cache = last_level_cache(device)
        self._random = torch.Generator(device=device).manual_seed(0)
        self._idle: dict[int, tuple[float, float]] = {}

    def time(self, key: CallKey, mode: str) -> tuple[float, float]:
        """Seconds of a call in one of `MODES`: on the device, and until it returns to the host.

        Raises:
            RuntimeError: it does not run on tensors of its own.
        """
        with torch.inference_mode(mode == "inference"), torch.set_grad_enabled(mode != "inference"):
            if mode == "backward":
                return self._gradients(key)
            run, sets, results = self._calls(key, keep=mode == "forward")
            turn = itertools.cycle(sets)

            def call() -> None:
                made = run(next(turn))
                if results:
                    results.append(made)
                    results.popleft()

            return self._seconds(call, len(sets))

    def time_update(
        self, shapes: Sequence[Sequence[int]], dtype: str, backward_bytes: int = 0
    ) -> tuple[float, float]:
        """Seconds of an update by fused AdamW, gradients then dropped: on the device, and the host.

        Args:
            shapes: of the parameters.
            dtype: of them.
            backward_bytes: moved since their gradients began to be made.
        """
        made = getattr(torch, dtype)
        tensors = [
            torch.nn.Parameter(torch.rand(list(shape), device=self.device).to(made))
            for shape in shapes
        ]
        optimizer = torch.optim.AdamW(tensors, lr=1e-6, fused=True)

        def grow() -> None:
            for tensor in tensors:
                tensor.grad = torch.zeros_like(tensor)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        if self.kind == "cuda":
            grow()
            return self._seconds(optimizer.step, 1)
        # Giving the gradients' memory back takes as long as it takes in a step.
        now, times = clock(self.device), list[float]()
        other = _Displacement(min(backward_bytes, 2 * self._cache))
        for _ in range(7):
            grow()
            other()
            started = now()
            update()
            times.append(now() - started)
        found = sorted(times[1:])[3]
        return found, found

    # ------------------------------------------------------------------------------- operands

    def _calls(
        self, key: CallKey, *, keep: bool, least: int = 1
    ) -> tuple[Callable[[Any], Any], list[Any], deque[Any]]:
        """The call, sets of arguments in turn, and results that are to be kept meanwhile.

        Sets are at least as many as asked for, if they are small; they may share memory, but no
        leaf of autograd.
        """
        run = operator_of(key.target)
        positional, named = json.loads(key.arguments)
        one = [self._tensor(t, key) for t in described_tensors((positional, named))]
        used = max(1, sum(t.numel() * t.element_size() for t in one))
        ages = key.ages if len(key.ages) == len(one) else (0,) * len(one)
        # Four caches are cold for certain.
        most = max(2, min(_MOST_COPIES, -(-4 * self._cache // used)))
        copies = [max(1, min(most, -(-age // used) if age > used else 1)) for age in ages]
        operands = [
            [first, *(self._tensor(t, key) for _ in range(count - 1))]
            for first, t, count in zip(
                one, described_tensors((positional, named)), copies, strict=True
            )
        ]
        sets = []
        for turn in range(max(*copies, least if used < _SMALL_BYTES else 1, 1)):
            chosen = [held[turn % len(held)] for held in operands]
            if keep:
                chosen = [
                    tensor.detach().requires_grad_() if wanted else tensor
                    for tensor, wanted in zip(chosen, key.gradients, strict=True)
                ]
            given = iter(chosen)
            sets.append((self._filled(positional, given), self._filled(named, given)))
        results: deque[Any] = deque()
        if keep:
            # A step keeps results for its backward pass: new ones go to memory that is cold.
            first = run(*sets[0][0], **sets[0][1])
            size = max(1, byte_count(first))
            count = max(1, min(_MOST_COPIES, -(-2 * self._cache // size)))
            results.extend([first] * count)
        return (lambda given: run(*given[0], **given[1])), sets, results

    def _tensor(self, described: Sequence[Any], key: CallKey) -> Tensor:
        shape, strides, name = described
        dtype = getattr(torch, name)
        room = (
            1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if all(shape) else 0
        )
        if dtype.is_floating_point:
            # Values near one: no zeros, no denormals.
            flat = torch.rand(room, generator=self._random, device=self.device).add_(0.5).to(dtype)
        elif "embedding" in key.target:
            rows = json.loads(key.arguments)[0][0][TENSOR][0][0]
            flat = torch.randint(0, rows, (room,), generator=self._random, device=self.device)
            flat = flat.to(dtype)
        else:
            flat = torch.ones(room, dtype=dtype, device=self.device)
            if dtype != torch.bool:
                flat.zero_()
        return flat.as_strided(shape, strides)

    def _filled(self, value: Any, tensors: Any) -> Any:
        """Arguments with tensors in their places."""
        if isinstance(value, list):
            return [self._filled(item, tensors) for item in value]
        if isinstance(value, dict):
            if TENSOR in value:
                return next(tensors)
            if DEVICE in value:
                return torch.device(self.device)
            for word in (DTYPE, MEMORY_FORMAT, LAYOUT):
                if word in value:
                    return getattr(torch, value[word])
            return {key: self._filled(item, tensors) for key, item in value.items()}
        return value

    # ------------------------------------------------------------------------------ gradients

    def _gradients(self, key: CallKey) -> tuple[float, float]:
        """Several calls' gradients in one pass of autograd, less a pass over as many views."""
        aged = key._replace(ages=(key.backward_bytes,) * len(key.gradients))
        run, sets, _ = self._calls(aged, keep=True, least=_TOGETHER)
        made = [with_gradients(run(given)) for given in sets]
        leaves = [with_gradients(given) for given in sets]
        held = [p for p, wanted in zip(key.parameters, key.gradients, strict=True) if wanted]
        size = sum(byte_count(t) for t, parameter in zip(leaves[0], held, strict=True) if parameter)
        # The operators behind have just written it.
        seeds = [torch.ones_like(t) for t in made[0]]
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
        if self._once(alone) < _SHORT_S:
            # What stands twice in a pass is computed once.
            count = min(_TOGETHER, len(made))
        most = -(-2 * self._cache // max(1, size * count)) if size else 1
        kept = deque(maxlen=min(_MOST_COPIES, most))
        groups = [
            several(turn % len(made) for turn in range(first, first + count))
            for first in range(0, len(made), count)
        ]
        turn = itertools.cycle(groups)
        # Memory for what is kept has been had from the system before anything counts.
        for _ in range(min(_MOST_COPIES, most)):
            next(turn)()
        device_s, host_s = self._seconds(lambda: next(turn)(), len(groups), count)
        idle = self._idle_pass(count)
        return (
            max(0.0, device_s - (idle[0] if self.kind == "cpu" else 0.0)) / count,
            max(0.0, host_s - idle[1]) / count,
        )

    def _idle_pass(self, count: int) -> tuple[float, float]:
        """Seconds of a pass of autograd that has next to nothing to do."""
        if count not in self._idle:
            leaves = [torch.ones(8, device=self.device).requires_grad_() for _ in range(count)]
            outs = [leaf.view(2, 4) for leaf in leaves]
            seeds = [torch.ones_like(out) for out in outs]
            self._idle[count] = self._seconds(
                lambda: torch.autograd.grad(outs, leaves, seeds, retain_graph=True), 1
            )
        return self._idle[count]

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

    def _seconds(
        self, call: Callable[[], object], turns: int, together: int = 1
    ) -> tuple[float, float]:
        call()
        enabled = gc.isenabled()
        gc.disable()
        try:
            return (
                self._on_gpu(call, together) if self.kind == "cuda" else self._on_cpu(call, turns)
            )
        finally:
            if enabled:
                gc.enable()

    def _on_cpu(self, call: Callable[[], object], turns: int) -> tuple[float, float]:
        now, other = clock(self.device), _Displacement(_DISPLACED)
        once = self._once(call)
        # All copies are used before anything counts.
        for _ in range(min(turns, math.ceil(0.3 * self.seconds / max(once, 1e-9)))):
            call()
        times: list[float] = []
        begun = time.perf_counter()
        while len(times) < 7 or (time.perf_counter() - begun < self.seconds and len(times) < 99):
            other()
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


class _Displacement:
    """On a CPU, what stands for the operators before a call: other code on other data."""

    def __init__(self, size_bytes: int) -> None:
        self._a, self._b = (torch.rand(max(1024, size_bytes // 8)) for _ in "ab")

    def __call__(self) -> None:
        torch.add(self._a, self._b, out=self._a)
        torch.tanh(self._b[:512])


def clock(device: str) -> Callable[[], float]:
    """The clock to time a device by: time on the core for one thread of a CPU, else on the wall.

    A single thread that another process takes the core from did not work meanwhile.
    """
    alone = torch.device(device).type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if alone else time.perf_counter
