"""The operator of a profile that does the work of one that a traced network calls.

Profiles time the operators of decoders and training steps under few names; `graph_programs` names
every ATen call of a network. Where nobody timed such a call on a processor, its likeness is asked:
the same product, convolution or attention by its stock kernel; a norm by a decoder's, and a map
over elements by an addition or an activation, of as many values: in bf16 processors convert each to
fp32 and back, so that they take no less than in fp32. Judged by what the calls do; that norms and
maps go by a decoder's operators and not by a training step's, and by values and not by bytes, was
chosen on 32 passes of eight networks (end_to_end.md).
"""

from __future__ import annotations

import math
from dataclasses import replace

from foreplan.datasets.program import (
    INPUT_GRADIENT,
    TRANSPOSED,
    WEIGHT_GRADIENT,
    Program,
    Variant,
    program,
)

#: Names that torch has for a matrix product.
_PRODUCTS = frozenset({"torch.linear", "torch.addmm", "torch.mm", "torch.matmul", "torch.bmm"})
#: Maps that compute a transcendental function of every element.
_FUNCTIONS = frozenset({"gelu", "silu", "tanh", "sigmoid", "exp", "sin", "cos", "pow", "erf"})
#: Operators that read and write each element about once.
_MAPS = frozenset(
    ["elementwise", "fill", "roll", "reduction", "pool", "softmax", "embedding", "add",
     "norm_gradient"]
)  # fmt: skip


def profiled_alike(item: Program) -> tuple[Program, float] | None:
    """The likeness of an operator in plain numbers, and how much of it; ``None`` without one."""
    item = timed_alike(item)
    d, v = item.dims, item.variant
    if v.storage != v.compute:
        return None
    dtype = "bf16" if v.compute in ("bf16", "fp16") else "fp32"
    plain = f"{dtype}/{dtype}"
    if item.op == "linear" and v.kernel in _PRODUCTS:
        return program("linear", Variant.parse(f"{plain}/torch.linear"), **d), 1.0
    if item.op in ("norm", "batch_norm"):
        return _as_wide(item, "norm", "layer_norm"), 1.0
    if item.op.removesuffix("_gradient") in ("attention", "full_attention"):
        kernel = "sdpa" if item.op.startswith("full") else "sdpa_causal"
        sizes = {name: d[name] for name in ("batch", "queries", "keys", "heads", "head_dim")}
        op = "attention_backward" if item.op.endswith("_gradient") else "attention_forward"
        return program(op, Variant.parse(f"{plain}/torch.{kernel}"), **sizes), 1.0
    if item.op == "adamw":
        adamw = Variant("fp32", "fp32", "torch.adamw")
        return program("optimizer_step", adamw, parameters=d["parameters"], tensors=1), 1.0
    if item.op == "conv":
        # Gradients of inputs and of weights are timed as one pass.
        back = v.kernel.endswith("_gradient")
        op, share = ("conv2d_backward", 0.5) if back else ("conv2d_forward", 1.0)
        size, out, window = (max(1, math.isqrt(d[n])) for n in ("inputs", "outputs", "taps"))
        return program(
            op, Variant.parse(f"{plain}/torch.conv2d"), batch=d["batch"], channels=d["cin"],
            height=size, width=size, filters=d["cout"], kernel_height=window, kernel_width=window,
            out_height=out, out_width=out, stride=max(1, round(size / out)), groups=d["groups"],
        ), share  # fmt: skip
    if item.op in _MAPS:
        function = v.kernel.removeprefix("torch.") in _FUNCTIONS
        return _as_wide(item, *(("activation", "gelu") if function else ("add", "add"))), 1.0
    return None


def timed_alike(item: Program) -> Program:
    """What profiles time in place of a gradient or transposed product: a plain one of its sizes."""
    kernel = item.variant.kernel
    for word in (INPUT_GRADIENT, WEIGHT_GRADIENT, TRANSPOSED):
        kernel = kernel.removesuffix(word)
    if item.op not in ("linear", "matmul") or kernel == item.variant.kernel:
        return item
    return replace(item, variant=replace(item.variant, kernel=kernel))


def _as_wide(item: Program, op: str, stock: str) -> Program:
    """The decoder's operator with rows as wide, and as many of them as move as many values."""
    variant, cols = Variant("bf16", "bf16", f"torch.{stock}"), item.dims["cols"]
    row = program(op, variant, rows=1, cols=cols)
    values = item.bytes / (4 if item.variant.compute == "fp32" else 2)
    return program(op, variant, rows=max(1, round(values / (row.bytes / 2))), cols=cols)
