"""Times the programs of a captured graph on this machine, host and device apart. Imports torch.

What a program's dimensions do not say is chosen: operands are contiguous, biases are left out, a
reduction is over the last dimension, casts and gathers are copies. A weight is held in as many
copies as the whole network's weights would displace from the caches, and the calls take them in
turn; activations are warm, or cold as well (`cold_operands`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from foreplan.datasets.cold_operands import InTurn, last_level_cache
from foreplan.datasets.program import Program

DTYPES = {
    "fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
    "int8": torch.int8, "int32": torch.int32, "int64": torch.int64,
}  # fmt: skip

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "relu": torch.relu, "tanh": torch.tanh, "neg": torch.neg,
    "sigmoid": torch.sigmoid, "exp": torch.exp, "cos": torch.cos, "sin": torch.sin,
    "rsqrt": torch.rsqrt, "pow": torch.square,
}  # fmt: skip
#: Most channels of a batch norm that is timed. Assumed.
_CHANNELS = 256

#: Cold operands fill this many caches, in so many sets at most (smaller operators take their
#: launch), made in so many seconds at most; as `cold_operands`.
_CACHES, _MOST_SETS, _SETS_S = 4, 64, 0.15

#: Rows of an embedding's table, which a program does not state: assumed.
_VOCABULARY = 8192


class Timing(NamedTuple):
    """Time of one call.

    Attributes:
        device_s: on the device, back to back, without the host's launch where that is apart.
        host_s: until the call returns; on a CPU the same as ``device_s``.
    """

    device_s: float
    host_s: float


class ProgramTimer:
    """Times programs on one torch device.

    Args:
        device: ``cpu`` or ``cuda:N``.
        weight_bytes: of the whole network; decides how many copies of a weight take turns.
        seconds: spent on each program after warm-up.
        cold: whether all operands and results are cold, as in a training step, and not weights
            alone.
    """

    def __init__(
        self, device: str, *, weight_bytes: float = 0.0, seconds: float = 0.05, cold: bool = False
    ) -> None:
        self.device = device
        self.cold = cold
        self.cuda = torch.device(device).type == "cuda"
        self.seconds = seconds
        self._displaced = min(weight_bytes, 2.0 * last_level_cache(device))

    def time(self, program: Program) -> Timing:
        """Time one program: medians over repeated calls."""
        with torch.inference_mode(program.op != "adamw"):
            call = self._in_turn(program) if self.cold else self.call(program)
            return self._time_cuda(call) if self.cuda else self._time_cpu(call)

    def call(self, program: Program) -> Callable[[], object]:
        """A function that runs the program once on inputs of its own."""
        d, dtype = program.dims, DTYPES[program.variant.compute]
        name = program.variant.kernel.rpartition(".")[2]
        if program.op == "linear":
            x, weights = self._draw(dtype, d["rows"], d["k"]), self._weights(dtype, d["n"], d["k"])
            return lambda: F.linear(x, next(weights))
        if program.op == "matmul":
            a = self._draw(dtype, d["batch"], d["m"], d["k"])
            b = self._draw(dtype, d["batch"], d["k"], d["n"])
            return lambda: torch.bmm(a, b)
        if program.op == "conv":
            return self._convolution(d, dtype, name)
        if program.op in ("attention", "full_attention"):
            return self._attention(d, dtype, program.op == "attention")
        if program.op == "adamw":
            parameter = torch.nn.Parameter(self._draw(dtype, d["parameters"]))
            parameter.grad = torch.zeros_like(parameter)
            return torch.optim.AdamW([parameter], fused=True, capturable=self.cuda).step
        if program.op == "embedding":
            table = self._draw(dtype, _VOCABULARY, d["cols"])
            ids = torch.randint(0, _VOCABULARY, (d["rows"],), device=self.device)
            return lambda: F.embedding(ids, table)
        x = self._draw(dtype, d["rows"], d["cols"])
        if program.op == "softmax":
            return lambda: torch.softmax(x, -1)
        if program.op == "norm":
            return self._norm(x, name)
        if program.op == "reduction":
            floating = dtype.is_floating_point
            return lambda: x.mean(-1) if floating else x.sum(-1)
        return self._elementwise(x, name, d.get("inputs", 1))

    def time_attention_backward(self, program: Program) -> float:
        """Seconds on the device of an attention's gradients: with the forward pass, less that."""
        dtype = DTYPES[program.variant.compute]
        heads = self._heads(program.dims, dtype)
        for operand in heads:
            operand.requires_grad_()
        forward = _attend(program.dims, heads, program.op == "attention")
        seed = torch.ones_like(forward())

        def both() -> None:
            torch.autograd.grad(forward(), heads, seed)

        time_one = self._time_cuda if self.cuda else self._time_cpu
        return max(0.0, time_one(both).device_s - time_one(forward).device_s)

    def _in_turn(self, program: Program) -> InTurn:
        """Calls on operands of their own in turn, and as many results kept."""
        started = time.perf_counter()
        wanted = -(-_CACHES * last_level_cache(self.device) // max(1, int(program.bytes)))
        calls = [self.call(program)]
        results: deque[Any] = deque([calls[0]()])
        while len(calls) < min(wanted, _MOST_SETS) and (
            len(calls) < 2 or time.perf_counter() - started < _SETS_S
        ):
            calls.append(self.call(program))
            results.append(calls[-1]())
        return InTurn(lambda call: call(), [(call,) for call in calls], results)

    # ---------------------------------------------------------------------------- operators

    def _convolution(
        self, d: dict[str, int], dtype: torch.dtype, name: str
    ) -> Callable[[], object]:
        channels = d["cin"] // d["groups"]
        size, window = math.isqrt(d["inputs"]), math.isqrt(d["taps"])
        square = size**2 == d["inputs"] and window**2 == d["taps"]
        extent, taps = (size, window) if square else (d["inputs"], d["taps"])
        out = math.isqrt(d["outputs"]) if square else d["outputs"]
        stride = max(1, round(extent / out))
        padding = max(0, ((out - 1) * stride + taps - extent + 1) // 2)
        rank = 2 if square else 1
        x = self._draw(dtype, d["batch"], d["cin"], *(extent,) * rank)
        weights = self._weights(dtype, d["cout"], channels, *(taps,) * rank)
        run: Any = F.conv2d if square else F.conv1d
        if not name.endswith("_gradient"):
            return lambda: run(x, next(weights), None, stride, padding, 1, d["groups"])
        result = self._like(run(x, next(weights), None, stride, padding, 1, d["groups"]))
        mask = [name.endswith("input_gradient"), name.endswith("weight_gradient"), False]
        zeros = [0] * rank
        return lambda: torch.ops.aten.convolution_backward(
            result, x, next(weights), None, [stride] * rank, [padding] * rank, [1] * rank, False,
            zeros, d["groups"], mask,
        )  # fmt: skip

    def _attention(
        self, d: dict[str, int], dtype: torch.dtype, causal: bool
    ) -> Callable[[], object]:
        return _attend(d, self._heads(d, dtype), causal)

    def _heads(self, d: dict[str, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        q = self._draw(dtype, d["batch"], d["heads"], d["queries"], d["head_dim"])
        k, v = (
            self._draw(dtype, d["batch"], d["kv_heads"], d["keys"], d["head_dim"]) for _ in "kv"
        )
        return q, k, v

    def _norm(self, x: Tensor, name: str) -> Callable[[], object]:
        if name == "batch_norm":
            # Rows hold batch, channels and all but the last extent; how many are channels is lost.
            # A channel a row is another kernel: 285 us on an H200 for the bytes of 22 us.
            image = x.view(1, math.gcd(x.shape[0], _CHANNELS), -1)
            mean = torch.zeros(image.shape[1], dtype=x.dtype, device=x.device)
            variance = torch.ones_like(mean)
            return lambda: F.batch_norm(image, mean, variance, mean, variance)
        weight = torch.ones(x.shape[1], dtype=x.dtype, device=x.device)
        if name == "rms_norm":
            return lambda: F.rms_norm(x, (x.shape[1],), weight)
        return lambda: F.layer_norm(x, (x.shape[1],), weight, weight)

    def _elementwise(self, x: Tensor, name: str, inputs: int) -> Callable[[], object]:
        if inputs == 1:
            unary = _UNARY.get(name) if x.is_floating_point() else None
            return (lambda: unary(x)) if unary else x.clone
        y = self._like(x)
        if inputs == 2 or not x.is_floating_point():
            return (lambda: torch.mul(x, y)) if name in ("mul", "backward") else (
                lambda: torch.add(x, y)
            )  # fmt: skip
        z = self._like(x)
        return lambda: torch.addcmul(x, y, z)

    # ------------------------------------------------------------------------------- inputs

    def _draw(self, dtype: torch.dtype, *shape: int) -> Tensor:
        if not dtype.is_floating_point:
            return torch.ones(shape, dtype=dtype, device=self.device)
        # Values near one: no zeros, no denormals.
        return torch.rand(shape, device=self.device).add_(0.5).to(dtype)

    def _like(self, x: Tensor) -> Tensor:
        return self._draw(x.dtype, *x.shape)

    def _weights(self, dtype: torch.dtype, *shape: int) -> Any:
        first = self._draw(dtype, *shape)
        size = first.numel() * first.element_size()
        copies = max(1, min(64, math.ceil(self._displaced / max(size, 1))))
        return itertools.cycle([first, *(first.clone() for _ in range(copies - 1))])

    # ------------------------------------------------------------------------------- timing

    def _time_cpu(self, call: Callable[[], object]) -> Timing:
        least = len(call.sets) if isinstance(call, InTurn) else 5
        seconds = median_call(call, self.seconds, clock(self.device), least=least)
        return Timing(seconds, seconds)

    def _time_cuda(self, call: Callable[[], object]) -> Timing:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        issued = []
        for _ in range(5):
            started = time.perf_counter()
            for _ in range(20):
                call()
            issued.append((time.perf_counter() - started) / 20)
            torch.cuda.synchronize()
        return Timing(self._graph_seconds(call), sorted(issued)[2])

    def _graph_seconds(self, call: Callable[[], object]) -> float:
        """Seconds on the device: calls in a CUDA graph, or between events where none records."""
        event: Any = torch.cuda.Event  # untyped
        start, stop = event(enable_timing=True), event(enable_timing=True)
        count = max(20, len(call.sets) if isinstance(call, InTurn) else 0)
        run: Callable[[], object]
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(count):
                    call()
            run = graph.replay
        except RuntimeError:
            torch.cuda.synchronize()
            run = lambda: [call() for _ in range(count)]  # noqa: E731
        run()
        torch.cuda.synchronize()
        times: list[float] = []
        begun = time.perf_counter()
        while len(times) < 5 or (time.perf_counter() - begun < self.seconds and len(times) < 50):
            start.record()
            run()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) / 1e3 / count)
        return sorted(times)[len(times) // 2]


def _attend(
    d: dict[str, int], heads: tuple[Tensor, Tensor, Tensor], causal: bool
) -> Callable[[], Tensor]:
    future, grouped = causal and d["queries"] > 1, d["heads"] != d["kv_heads"]
    return lambda: F.scaled_dot_product_attention(*heads, is_causal=future, enable_gqa=grouped)


def clock(device: str) -> Callable[[], float]:
    """The clock to time a device by: time on the core for one thread of a CPU, else on the wall.

    A single thread that another process takes the core from did not work meanwhile.
    """
    alone = torch.device(device).type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if alone else time.perf_counter


def median_call(
    call: Callable[[], object], seconds: float, now: Callable[[], float], *, least: int = 5
) -> float:
    """Median time of a call by a clock, after a warm-up."""
    call()
    begun = time.perf_counter()
    call()
    count = max(1, math.ceil(1e-4 / max(time.perf_counter() - begun, 1e-9)))
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < least or time.perf_counter() - begun < seconds:
        started = now()
        for _ in range(count):
            call()
        times.append((now() - started) / count)
    return sorted(times)[len(times) // 2]
