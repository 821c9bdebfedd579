"""Turn the programs of a training step into something that can be timed. Imports torch.

An operator's forward pass is measured as it stands in the step, a module's call that records its
gradient; its operands are in the variant's dtype already, because casts are programs of their own.
Its backward pass is what autograd runs for it: both products, 8-bit operands dequantised first,
gradients of parameters added to fp32 buffers.

What the operator before has just written is warm: activations in the forward pass, gradients in the
backward pass, casts of weights. Cold is what was last used about a step ago: master weights, what
was saved for the backward pass, gradient buffers; see `foreplan.datasets.kernels.cold_operands`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foreplan.datasets.kernels.cold_operands import InTurn, in_turn
from foreplan.datasets.kernels.quantise import FP8_LIMIT, INT8_LIMIT, Along, product, quantise
from foreplan.datasets.kernels.training_programs import COLD, POOLS
from foreplan.datasets.kernels.training_variant import EIGHT_BITS, training_variant
from foreplan.datasets.program import Program, Variant
from foreplan.errors import SpecError

_LIMITS = {"int8": INT8_LIMIT, "fp8": FP8_LIMIT}
_EIGHT_BIT_KERNELS = {"int8": "torch.int_mm", "fp8": "torch.scaled_mm"}
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
_FORWARD, _BACKWARD, _WEIGHT_GRADIENT = "_forward", "_backward", "_weight_gradient"
_RATE = 1e-6
#: Positions of a plane that a batch norm is timed on, at most (chosen: 16 x 16 of an image).
_PLANE = 256


def training_call(program: Program, device: str) -> InTurn:
    """The call that a profile times.

    Args:
        program: an operator of `foreplan.datasets.kernels.training_programs`.
        device: torch device.

    Raises:
        SpecError: no such operator or kernel.
    """
    # A measuring process runs in inference mode; graphs that are made outside can be used in it.
    with torch.inference_mode(False), torch.enable_grad():
        return _call(program, device)


def _call(program: Program, device: str) -> InTurn:
    random = torch.Generator(device=device).manual_seed(0)

    def draw(*shape: int, dtype: str = "fp32") -> Tensor:
        drawn = torch.randn(*shape, generator=random, device=device)
        return drawn.to(DTYPES[dtype])

    if program.op == "optimizer_step":
        return _optimizer(program, draw)
    if program.op == "cast":
        return _cast(program, draw)
    for suffix in (_FORWARD, _BACKWARD, _WEIGHT_GRADIENT):
        if program.op.endswith(suffix):
            op = program.op.removesuffix(suffix)
            if op == "linear":
                return _linear(program, suffix, draw)
            builder = _BUILDERS.get(op)
            if builder is not None:
                return _passes(builder, program, suffix, draw)
    raise SpecError("program", got=str(program), expected="an operator of a training step")


class _Operator(nn.Module):
    """A function in the form in which a model calls it."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self._of = run

    def forward(self, *inputs: Tensor) -> Tensor:
        return self._of(*inputs)


def _passes(builder: Callable[..., Any], program: Program, suffix: str, draw: Any) -> InTurn:
    """Forward or backward of a differentiable function, by autograd."""
    run, inputs, parameters = builder(program.dims, program.variant, draw)
    if suffix == _FORWARD:
        module = _Operator(run)
        given = [_leaf(x, x.is_floating_point()) for x in inputs]
        return in_turn(
            lambda *cold: module(*given, *cold), lambda: [_leaf(p, True) for p in parameters], given
        )
    passed = inputs if suffix == _BACKWARD else ()
    return _backward(run, inputs, parameters, passed, draw)


def _backward(
    run: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    passed: Sequence[Tensor],
    draw: Any,
) -> InTurn:
    """What autograd does for ``run``: gradients of ``passed`` inputs handed on, others added up.

    Every set is a graph of its own, with its own saved tensors and gradient buffers. The result's
    gradient is drawn: a GPU multiplies equal numbers at less power, and so at a higher clock.
    """
    handed = [x.is_floating_point() and any(x is p for p in passed) for x in inputs]
    written: list[Tensor] = []  # the result's gradient

    def graph() -> list[Any]:
        given = [_leaf(x, wanted) for x, wanted in zip(inputs, handed, strict=True)]
        held = [_leaf(p, True) for p in parameters]
        out = run(*given, *held)
        if not written:
            written.append(draw(*out.shape).to(out.dtype) if out.dim() else torch.ones_like(out))
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in held]
        return [out, [x for x, wanted in zip(given, handed, strict=True) if wanted], held, sums]

    def backward(out: Tensor, given: list[Tensor], held: list[Tensor], sums: list[Tensor]) -> Any:
        found = torch.autograd.grad(out, [*given, *held], written[0], retain_graph=True)
        for total, part in zip(sums, found[len(given) :], strict=True):
            total.add_(part)
        return found

    return in_turn(backward, graph, written, kept=False)


def _leaf(x: Tensor, wanted: bool) -> Tensor:
    return x.detach().clone().requires_grad_(wanted)


def _conv2d(d: Any, v: Variant, draw: Any) -> Any:
    stride, groups = d["stride"], d["groups"]
    x = draw(d["batch"], d["channels"], d["height"], d["width"], dtype=v.compute)
    w = draw(
        d["filters"], d["channels"] // groups, d["kernel_height"], d["kernel_width"],
        dtype=v.compute,
    )  # fmt: skip
    padding = tuple(
        -(-max((out - 1) * stride + kernel - size, 0) // 2)
        for out, kernel, size in (
            (d["out_height"], d["kernel_height"], d["height"]),
            (d["out_width"], d["kernel_width"], d["width"]),
        )
    )

    def run(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w, stride=stride, padding=padding, groups=groups)

    return run, (x,), (w,)


def _pool(d: Any, v: Variant, draw: Any) -> Any:
    """Windows are as square as ``taps`` and the image allow, and as far apart as the sizes say."""
    spatial = 1 if v.kernel.endswith("1d") else 2
    image, out = ((d["height"], d["width"]), (d["out_height"], d["out_width"]))
    x = draw(d["batch"], d["channels"], *image[-spatial:], dtype=v.compute)
    pool = getattr(F, v.kernel.removeprefix("torch."), None)
    if v.kernel.removeprefix("torch.") not in POOLS or pool is None:
        raise SpecError("kernel", got=v.kernel, expected=f"one of {', '.join(POOLS.values())}")
    if "adaptive" in v.kernel:
        return (lambda x: pool(x, out[-spatial:])), (x,), ()
    high = max(
        (n for n in range(1, math.isqrt(d["taps"]) + 1) if d["taps"] % n == 0), default=1
    ) if spatial == 2 else 1  # fmt: skip
    window = [min(size, n) for size, n in zip((high, d["taps"] // high), image, strict=True)]
    stride = [max(1, round(n / m)) for n, m in zip(image, out, strict=True)]
    padding = [
        min(size // 2, max(0, -((n - size - (m - 1) * step) // 2)))
        for size, n, m, step in zip(window, image, out, stride, strict=True)
    ]
    sizes = [tuple(each[-spatial:]) for each in (window, stride, padding)]
    return (lambda x: pool(x, *sizes)), (x,), ()


def _attention(d: Any, v: Variant, draw: Any) -> Any:
    """Heads lie as projections leave them, inside of a position; so does the result's gradient.

    On AVX2 the backward pass in bf16 takes 1.4 times as long as on heads that lie apart.
    """
    causal = v.kernel.endswith("_causal")

    def heads(positions: int) -> Tensor:
        drawn = draw(d["batch"], positions, d["heads"], d["head_dim"], dtype=v.compute)
        return drawn.transpose(1, 2)  # type: ignore[no-any-return]

    def run(q: Tensor, k: Tensor, value: Tensor) -> Tensor:
        made = F.scaled_dot_product_attention(q, k, value, is_causal=causal)
        return made.transpose(1, 2)

    return run, (heads(d["queries"]), heads(d["keys"]), heads(d["keys"])), ()


def _matmul(d: Any, v: Variant, draw: Any) -> Any:
    a = draw(d["batch"], d["rows"], d["k"], dtype=v.compute)
    return torch.bmm, (a, draw(d["batch"], d["k"], d["n"], dtype=v.compute)), ()


def _embedding(d: Any, v: Variant, draw: Any) -> Any:
    table = draw(d["vocab"], d["cols"])
    ids = (torch.arange(d["rows"], device=table.device) * 7919) % d["vocab"]
    dtype = DTYPES[v.compute]
    return (lambda ids, table: F.embedding(ids, table).to(dtype)), (ids,), (table,)


def _embedding_bag(d: Any, v: Variant, draw: Any) -> Any:
    table = draw(d["vocab"], d["cols"], dtype=v.compute)
    ids = (torch.arange(d["rows"], device=table.device) * 7919) % d["vocab"]
    starts = torch.arange(d["bags"], device=table.device) * d["rows"] // d["bags"]
    return (lambda ids, table: F.embedding_bag(ids, table, starts, mode="sum")), (ids,), (table,)


def _norm(d: Any, v: Variant, draw: Any) -> Any:
    x = draw(d["rows"], d["cols"], dtype=v.compute)
    # Beside an input of 16 bits a GPU takes parameters of its dtype alone.
    w, b = (draw(d["cols"], dtype=v.storage if x.is_cuda else "fp32") for _ in range(2))
    if v.kernel == "torch.layer_norm":
        return (lambda x, w, b: F.layer_norm(x, (d["cols"],), w, b)), (x,), (w, b)
    if v.kernel == "torch.batch_norm":  # cols are channels, rows everything else
        # Planes lie whole, as a convolution leaves them. How large they are the program does not
        # say; channels that lie side by side took 1.3 to 5.3 times as long (AMD EPYC, Zen 5).
        plane = max(n for n in range(1, min(_PLANE, d["rows"]) + 1) if d["rows"] % n == 0)
        shaped = x.view(d["rows"] // plane, d["cols"], plane)
        return (lambda x, w, b: F.batch_norm(x, None, None, w, b, True)), (shaped,), (w, b)

    def rms_norm(x: Tensor, w: Tensor) -> Tensor:
        wide = x.float()
        return w * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    return rms_norm, (x,), (w,)


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "torch.softmax": lambda x: F.softmax(x, -1),
    "torch.gelu": F.gelu,
    "torch.gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "torch.silu": F.silu,
    "torch.relu": F.relu,
    "torch.tanh": torch.tanh,
    "torch.add": torch.add,
    "torch.mul": torch.mul,
}


def _map(d: Any, v: Variant, draw: Any) -> Any:
    run = _FUNCTIONS.get(v.kernel)
    if run is None:
        raise SpecError("kernel", got=v.kernel, expected=f"one of {', '.join(_FUNCTIONS)}")
    count = 2 if v.kernel in ("torch.add", "torch.mul") else 1
    return run, tuple(draw(d["rows"], d["cols"], dtype=v.compute) for _ in range(count)), ()


def _cross_entropy(d: Any, v: Variant, draw: Any) -> Any:
    x = draw(d["rows"], d["cols"], dtype=v.compute)
    target = torch.arange(d["rows"], device=x.device) % d["cols"]
    return (lambda x: F.cross_entropy(x, target)), (x,), ()


_BUILDERS: dict[str, Callable[..., Any]] = {
    "conv2d": _conv2d,
    "pool": _pool,
    "attention": _attention,
    "matmul": _matmul,
    "embedding": _embedding,
    "embedding_bag": _embedding_bag,
    "norm": _norm,
    "softmax": _map,
    "activation": _map,
    "elementwise": _map,
    "cross_entropy": _cross_entropy,
}


def _linear(program: Program, suffix: str, draw: Any) -> InTurn:
    """The linear that the execution of plans calls, without the casts of its operands."""
    from foreplan.datasets.kernels.training_linear import linear
    from foreplan.datasets.kernels.training_recipe import recipe

    d, v = program.dims, program.variant
    b = draw(d["n"])
    along: Along = "tensor" if v.kernel.endswith("@tensor") else "row"
    if suffix == _FORWARD:
        if v.compute in EIGHT_BITS:
            limit = _LIMITS[v.compute]
            x = quantise(draw(d["rows"], d["k"]), v.compute, along)
            w = quantise(draw(d["n"], d["k"]), v.compute, along, limit=limit).transposed()
            out = DTYPES[recipe(str(v)).output]
            return in_turn(lambda: product(x, w, b, out), list, [x, w])
        given = _leaf(draw(d["rows"], d["k"], dtype=v.compute), True)
        weight, bias = _leaf(draw(d["n"], d["k"], dtype=v.compute), True), _leaf(b, True)
        how = recipe(f"fp32/{v.compute}/torch.linear")
        module = _Operator(lambda w: linear(given, w, bias, how))
        # A weight in another dtype was just cast from its master, which is a program of its own.
        warm, cold = [given], v.compute != "bf16"
        if not cold:
            warm.append(weight)
        return in_turn(module, lambda: [_leaf(weight, True) if cold else weight], warm)
    text = f"fp32/{v.compute}/torch.linear"
    if v.storage in EIGHT_BITS:
        text = f"fp32/{v.storage}/{_EIGHT_BIT_KERNELS[v.storage]}+{v.compute}"
        text += "@tensor" if along == "tensor" else ""
    how = recipe(text)
    inputs = (draw(d["rows"], d["k"], dtype=training_variant(how.text).returned),)
    return _backward(
        lambda x, w, b: linear(x, w, b, how), inputs, (draw(d["n"], d["k"]), b),
        inputs if suffix == _BACKWARD else (), draw,
    )  # fmt: skip


def _cast(program: Program, draw: Any) -> InTurn:
    """A cast to bf16, or to 8 bits with one scale a row or in all; of cold inputs, many in turn."""
    x = draw(*program.sizes, dtype=program.variant.storage)
    dtype, cold = program.variant.compute, program.variant.kernel.endswith(COLD)
    # Masters are the right operands of products, which take the whole range.
    limit = _LIMITS.get(dtype) if cold else None
    along: Along = "tensor" if "quantise_tensor" in program.variant.kernel else "row"

    def cast(x: Tensor) -> Any:
        if dtype in EIGHT_BITS:
            return quantise(x, dtype, along, limit=limit)
        return x.to(DTYPES[dtype])

    return in_turn(cast, lambda: [x.clone() if cold else x], () if cold else [x])


def _optimizer(program: Program, draw: Any) -> InTurn:
    """A step of torch's fused optimizer, over as many tensors of equal size."""
    weights = draw(program.dims["parameters"]).tensor_split(program.dims["tensors"])
    kernel = program.variant.kernel
    if kernel not in ("torch.adamw", "torch.sgd"):
        raise SpecError("kernel", got=kernel, expected="torch.sgd or torch.adamw")

    def optimizer() -> list[torch.optim.Optimizer]:
        held = [nn.Parameter(weight.clone()) for weight in weights]
        for one in held:
            one.grad = torch.ones_like(one)
        if kernel == "torch.adamw":
            return [torch.optim.AdamW(held, lr=_RATE, fused=True)]
        return [torch.optim.SGD(held, lr=_RATE, momentum=0.9, fused=True)]

    return in_turn(lambda made: made.step(), optimizer)
