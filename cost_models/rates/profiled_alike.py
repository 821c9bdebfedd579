"""The operator of a profile that does the work of one that a traced network calls.

Profiles time the operators of decoders and training steps under few names; `graph_programs` names
every ATen call of a network. Where nobody timed such a call on a processor, its likeness is asked:
the same product, convolution or attention by its stock kernel; a product of two activations by a
linear of as many rows; a norm by a decoder's, and a map over elements by an addition or a GELU, of
as many values: in bf16 processors convert each to fp32 and back, so that they take no less than in
fp32. Judged by what the calls do; that norms and maps go by a decoder's operators and not by a
training step's, and by values and not by bytes, was chosen on 32 passes of eight networks
(end_to_end.md). What is beside a likeness: `pixel_products`, `pool_windows`,
`slow_functions`, `narrow_norms`; and in its place: `filter_gradients`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType

from foreplan.cost_models.lowering.copy_layout import plain_kernel
from foreplan.cost_models.rates.operator_rates import by_channel
from foreplan.cost_models.rates.pixel_products import is_pixel_product, pixel_product
from foreplan.datasets.device import Device
from foreplan.datasets.program import (
    CHANNELS_LAST,
    INPUT_GRADIENT,
    TRANSPOSED,
    WEIGHT_GRADIENT,
    Program,
    Variant,
    program,
)

#: Names that torch has for a matrix product.
_PRODUCTS = frozenset(
    f"torch.{name}"
    for name in ("linear", "addmm", "mm", "matmul", "bmm", "baddbmm", "addbmm", "einsum")
)
#: How much of a decoder's GELU one takes, and its gradient; oneDNN computes both (`measured`, as
#: below: ``tests/benchmarks/likeness_figures.py``, seed 0; the gradient in bf16: assumed).
_GELU = MappingProxyType({"fp32": (1.25, 2.5), "bf16": (1.0, 1.85)})
#: What a convolution with a filter a channel takes of the time of plain images where channels lie
#: last, forward and for each gradient (measured).
_BY_CHANNEL_LAST = MappingProxyType({"": 0.45, INPUT_GRADIENT: 0.35, WEIGHT_GRADIENT: 0.8})
#: What an update takes of a profile's, which was timed with all tensors of a network and waits for
#: each; that is apart in a pass (`processor_host`; fitted with it).
_UPDATE = 0.8
#: What a value takes of a decoder's (measured): in fp32, where none is converted and back, and of
#: norms of channels, whose mean and variance are known or a call of their own.
_UNCONVERTED, _OF_CHANNELS = 0.6, 0.5
#: Operators that read and write each element about once.
_MAPS = frozenset(
    ["elementwise", "fill", "roll", "reduction", "pool", "pool_gradient", "softmax", "embedding",
     "add", "dropout"]
)  # fmt: skip


def profiled_alike(item: Program, device: Device) -> tuple[Program, float] | None:
    """The likeness of an operator in plain numbers, and how much of it; ``None`` without one.

    Args:
        item: what is asked for.
        device: on which; a processor.
    """
    item, often = timed_alike(item), 1.0
    if is_pixel_product(item, device):
        item, often = pixel_product(item)
    d, v = item.dims, item.variant
    if v.storage != v.compute:
        return None
    dtype = "bf16" if v.compute in ("bf16", "fp16") else "fp32"
    plain = f"{dtype}/{dtype}"
    if item.op == "linear" and v.kernel in _PRODUCTS:
        return program("linear", Variant.parse(f"{plain}/torch.linear"), **d), often
    if item.op == "matmul" and v.kernel in _PRODUCTS:
        # Of as many rows as all matrices of a batch have together.
        as_linear = {"rows": d["batch"] * d["m"], "n": d["n"], "k": d["k"]}
        return program("linear", Variant.parse(f"{plain}/torch.linear"), **as_linear), 1.0
    if item.op in ("norm", "batch_norm", "norm_gradient"):
        share = _OF_CHANNELS if d.get("channels", 1) > 1 else 1.0
        return _as_wide(item, "norm", "layer_norm", share), 1.0
    if item.op == "attention" and d["queries"] == 1 and dtype == "bf16":
        return replace(item, variant=Variant.parse(f"{plain}/torch.sdpa")), 1.0  # a decoder's
    if item.op.removesuffix("_gradient") in ("attention", "full_attention"):
        kernel = "sdpa" if item.op.startswith("full") else "sdpa_causal"
        sizes = {name: d[name] for name in ("batch", "queries", "keys", "heads", "head_dim")}
        op = "attention_backward" if item.op.endswith("_gradient") else "attention_forward"
        return program(op, Variant.parse(f"{plain}/torch.{kernel}"), **sizes), 1.0
    if item.op == "adamw":
        adamw = Variant("fp32", "fp32", "torch.adamw")
        step = program("optimizer_step", adamw, parameters=d["parameters"], tensors=1)
        return step, _UPDATE
    if item.op == "conv":
        # Gradients of inputs and of weights are timed as one pass.
        back = next((g for g in (INPUT_GRADIENT, WEIGHT_GRADIENT) if v.kernel.endswith(g)), "")
        op, share = ("conv2d_backward", 0.5) if back else ("conv2d_forward", 1.0)
        if CHANNELS_LAST in v.kernel and by_channel(item):
            share *= _BY_CHANNEL_LAST[back]
        size, out, window = (max(1, math.isqrt(d[n])) for n in ("inputs", "outputs", "taps"))
        return program(
            op, Variant.parse(f"{plain}/torch.conv2d"), batch=d["batch"], channels=d["cin"],
            height=size, width=size, filters=d["cout"], kernel_height=window, kernel_width=window,
            out_height=out, out_width=out, stride=max(1, round(size / out)), groups=d["groups"],
        ), share  # fmt: skip
    if item.op in _MAPS:
        kernel = plain_kernel(v.kernel)
        if kernel in ("torch.gelu", "torch.gelu_tanh"):
            return _as_wide(item, "activation", "gelu"), _GELU[dtype][0]
        if kernel in ("torch.gelu_backward", "torch.gelu_tanh_backward"):
            forward = program(item.op, v, **{**d, "inputs": 1})
            return _as_wide(forward, "activation", "gelu"), _GELU[dtype][1]
        return _as_wide(item, "add", "add"), 1.0
    return None


def timed_alike(item: Program) -> Program:
    """What profiles time in place of a gradient or transposed product: a plain one of its sizes."""
    kernel = item.variant.kernel
    for word in (INPUT_GRADIENT, WEIGHT_GRADIENT, TRANSPOSED):
        kernel = kernel.removesuffix(word)
    if item.op not in ("linear", "matmul") or kernel == item.variant.kernel:
        return item
    return replace(item, variant=replace(item.variant, kernel=kernel))


def _as_wide(item: Program, op: str, stock: str, share: float = 1.0) -> Program:
    """The decoder's operator with rows as wide, and as many of them as move a share of values."""
    variant, cols = Variant("bf16", "bf16", f"torch.{stock}"), item.dims["cols"]
    row = program(op, variant, rows=1, cols=cols)
    fp32 = item.variant.compute == "fp32"
    values = share * (_UNCONVERTED * item.bytes / 4 if fp32 else item.bytes / 2)
    return program(op, variant, rows=max(1, round(values / (row.bytes / 2))), cols=cols)
