"""The operator of a profile that does the work of one that a traced network calls.

Profiles time the operators of decoders and training steps under few names; `graph_programs` names
every ATen call of a network. Where nobody timed such a call on a processor, its likeness is asked:
the same product, convolution or attention by its stock kernel; a product of two activations by a
linear of as many rows; a norm by a decoder's, and a map over elements by an addition or a GELU, of
as many values: in bf16 processors convert each to fp32 and back, so that they take no less than in
fp32. Judged by what the calls do; that norms and maps go by a decoder's operators and not by a
training step's, and by values and not by bytes, was chosen on 32 passes of eight networks
(end_to_end.md). Products in fp16 take several times as long as in fp32 where a processor has no
arithmetic for it (`_HALF`). What is beside a likeness: `pixel_products`, `pool_windows`,
`slow_functions`, `chosen_kernels`, `narrow_norms`, `narrow_rows`, `rows_across`, `picked_rows`,
`pool_results`, `channel_lanes`; and in its place: `filter_gradients`, `picked_losses`,
`wide_windows`, `written_out`, `table_gradients`.
Convolutions have their likeness from `convolution_alike`.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from foreplan.cost_models.lowering.copy_layout import plain_kernel
from foreplan.cost_models.rates.convolution_alike import convolution_alike
from foreplan.cost_models.rates.pixel_products import is_pixel_product, pixel_product
from foreplan.datasets.device import Device
from foreplan.datasets.program import (
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
#: What an update takes of a profile's, which was timed with all tensors of a network and waits for
#: each; that is apart in a pass (`processor_host`; fitted with it).
_UPDATE = 0.8
#: What a value takes of a decoder's (measured): in fp32, where none is converted and back, and of
#: norms of channels, whose mean and variance are known or a call of their own.
_UNCONVERTED, _OF_CHANNELS = 0.6, 0.5
#: What products in fp16 take of fp32's on a processor that converts each value by itself: of rows
#: up to ``4 - 3 * 16 / (rows + 16)``, of pairs of matrices, images and filters of a channel each,
#: attention. Measured on one core of an EPYC (Zen 5), torch 2.13: 1.0-4.0 within 0.4 of that, 12-16
#: (40 for the largest), 15-47, 9, 2.4-3.3. Convolutions by channel count as any. Attention of one
#: query takes 1.55 times bf16's, which is itself several times fp32's.
_HALF = MappingProxyType({"linear": 4.0, "matmul": 15.0, "conv": 30.0, "attention": 3.0})
_HALF_ROWS, _HALF_DECODING = 16, 1.55
#: What products in fp64 take of fp32's, whose vectors have twice as many lanes: 1.7-2.0 of four
#: sizes, and 4.3 of a convolution, which torch computes by itself (one core of an EPYC, Zen 5).
_DOUBLE = MappingProxyType({"linear": 1.9, "matmul": 1.9, "attention": 1.9, "conv": 4.0})
#: Instructions by which a processor computes in fp16 (Arm's: all that the zoo knows).
_HALF_ISAS = frozenset({"avx512_fp16", "amx_fp16", "neon"})
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
    item = timed_alike(item)
    if item.variant.storage != item.variant.compute:
        return None
    dtype = "bf16" if item.variant.compute in ("bf16", "fp16") else "fp32"
    half, times = _half(item, device), 1.0
    if item.variant.compute == "fp64":
        times = _DOUBLE.get(item.op.removesuffix("_gradient").removeprefix("full_"), 1.0)
    if half and not _is_decoding(item):
        dtype = "fp32"
    found = _alike(item, device, dtype)
    return found and (found[0], (half or times) * found[1])


def _is_decoding(item: Program) -> bool:
    return item.op == "attention" and item.dims["queries"] == 1


def _half(item: Program, device: Device) -> float:
    """What a product in fp16 takes of one in fp32; 0 of other work, and where fp16 is quick."""
    op = item.op.removesuffix("_gradient").removeprefix("full_")
    times = _HALF.get(op, 0.0)
    if item.variant.compute != "fp16" or _HALF_ISAS & set(device.isa) or not times:
        return 0.0
    if _is_decoding(item):
        return _HALF_DECODING
    if op == "linear":
        return times - (times - 1.0) * _HALF_ROWS / (item.dims["rows"] + _HALF_ROWS)
    return times


def _alike(item: Program, device: Device, dtype: str) -> tuple[Program, float] | None:
    """The likeness in fp32 or 16 bits."""
    often = 1.0
    if is_pixel_product(item, device):
        item, often = pixel_product(item)
    d, v = item.dims, item.variant
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
    if _is_decoding(item) and dtype == "bf16":
        return replace(item, variant=Variant.parse(f"{plain}/torch.sdpa")), 1.0  # a decoder's
    if item.op.removesuffix("_gradient") in ("attention", "full_attention"):
        # In 16 bits torch goes through all keys either way, and profiles time causal ones.
        full = item.op.startswith("full") and dtype == "fp32"
        kernel = "sdpa" if full else "sdpa_causal"
        sizes = {name: d[name] for name in ("batch", "queries", "keys", "heads", "head_dim")}
        op = "attention_backward" if item.op.endswith("_gradient") else "attention_forward"
        return program(op, Variant.parse(f"{plain}/torch.{kernel}"), **sizes), 1.0
    if item.op == "adamw":
        adamw = Variant("fp32", "fp32", "torch.adamw")
        step = program("optimizer_step", adamw, parameters=d["parameters"], tensors=1)
        return step, _UPDATE
    if item.op == "conv":
        return convolution_alike(item, device, plain)
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
    # Rows of a table are copied as they are, whatever their dtype.
    as_stored = item.variant.compute in ("fp32", "fp64") or item.op == "embedding"
    values = share * (_UNCONVERTED * item.bytes / 4 if as_stored else item.bytes / 2)
    if values < row.bytes / 2:  # of all elements at once: less than a row of as many
        narrower = max(1, round(cols * values / (row.bytes / 2)))
        return program(op, variant, rows=1, cols=narrower)
    return program(op, variant, rows=max(1, round(values / (row.bytes / 2))), cols=cols)
