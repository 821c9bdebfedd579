"""`program_table`: programs as rows of an operator table, by the library that answers for each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from foreplan.cost_models.lowering.attention_mask import AttentionMask
from foreplan.cost_models.lowering.backward_steps import BACKWARD, BY_GROUP, CHANNEL_SUM
from foreplan.cost_models.lowering.copy_layout import ACROSS, plain_kernel
from foreplan.cost_models.lowering.forward_program import BIAS
from foreplan.cost_models.lowering.gradient_maps import SCANS
from foreplan.cost_models.lowering.map_kernel import MapKernel, map_kernel
from foreplan.cost_models.lowering.pool_row import pool_row
from foreplan.cost_models.operators.fitted_experts import FittedExperts
from foreplan.cost_models.operators.operator_features import FAMILIES
from foreplan.datasets.device import Device
from foreplan.datasets.operators import OF_BATCH
from foreplan.datasets.program import CHANNELS_LAST, INPUT_GRADIENT, WEIGHT_GRADIENT, Program
from foreplan.datasets.sweeps.map_functions import MAP_FUNCTIONS
from foreplan.datasets.sweeps.operator_cases import RECORDED
from foreplan.datasets.sweeps.operator_table import (
    UNKNOWN,
    OperatorTable,
    operator_table,
    texts,
)

#: (storage, compute) of a linear to the data type of the tables.
_LINEAR = {
    ("fp32", "fp32"): "fp32",
    ("bf16", "bf16"): "bfloat16",
    ("fp16", "fp16"): "float16",
    ("int8", "bf16"): "int8_wo",
    ("int8", "fp16"): "int8_wo",
    ("int4", "bf16"): "int4_wo",
    ("int4", "fp16"): "int4_wo",
    ("fp8", "fp8"): "fp8",
    ("fp8", "bf16"): "fp8",
    ("int8", "int8"): "sq",
}

#: (cache, compute) of an attention to the data type of the tables.
_ATTENTION = {
    ("bf16", "bf16"): "bfloat16/bfloat16",
    ("fp16", "fp16"): "float16/float16",
    ("fp32", "fp32"): "fp32/fp32",
    ("fp8", "bf16"): "bfloat16/fp8",
    ("int8", "bf16"): "bfloat16/int8",
    ("fp8", "fp8"): "fp8/fp8",
}

_WIDE = {"fp32": "fp32", "bf16": "bfloat16", "fp16": "float16"}

#: A library by kind of operator and data type.
_Libraries = Mapping[tuple[str, str], str]


def recorded_libraries(
    model: FittedExperts, device: Device | None = None
) -> dict[tuple[str, str], str]:
    """Library whose operators were timed inside CUDA graphs, by kind and dtype.

    On the chip of a device, or on any.
    Those of another board of the chip too, before the device's own operators of another library: on
    an H100 an H200's sweep prices torch's products 12 to 13 % off in the mean, SGLang's tables of
    the very board make networks 10 to 20 % too long (docs/results/end_to_end.md, 2026-11-27).
    """
    name, chip = (None, None) if device is None else (device.name, device.chip)
    timed = sorted(model.timed(), key=lambda t: (t.device.name == name, t.library))
    return {
        (kind, t.dtype): t.library
        for t in timed
        if t.library.startswith(RECORDED) and chip in (None, t.device.chip)
        for kind in t.kinds
    }


def program_table(
    programs: Sequence[Program], device: Device, recorded: _Libraries = MappingProxyType({}),
    elsewhere: _Libraries = MappingProxyType({}),
) -> OperatorTable:  # fmt: skip
    """Programs as rows of an operator table; what the tables have no like of is `UNKNOWN`.

    Args:
        programs: what is asked for (N,).
        device: on which.
        recorded: of the device's chip, from `recorded_libraries`.
        elsewhere: of any chip, for what no published table has.
    """
    asked = [_row(program) for program in programs]
    libraries: list[str | None] = []
    rows: list[_Row] = []
    for row in asked:
        kind, dtype, dims = row
        library = None if _few_drawn(kind, dims) else recorded.get((kind, dtype))
        published = row if library else _published(row)
        # Published convolutions are of FP32, of 16 bits libraries run others; published maps go
        # through whole operands as they lie, one tensor each.
        others = kind in FAMILIES["conv"] and dtype != "fp32"
        if published is _NOTHING or others or _unpublished(row):
            library = library or elsewhere.get((kind, dtype))
        libraries.append(library)
        rows.append(row if library else published)
    names = sorted({name for _, _, dims in rows for name in dims})
    count = len(rows)
    return operator_table(
        op=texts(kind for kind, _, _ in rows),
        kind=texts(kind for kind, _, _ in rows),
        dtype=texts(dtype for _, dtype, _ in rows),
        # Not torch called eagerly: times without the host's launch.
        library=texts(library or "trtllm" for library in libraries),
        device=texts(device.name for _ in rows),
        dims={
            name: np.array([dims.get(name, 0) for _, _, dims in rows], dtype=np.float64)
            for name in names
        },
        latency_s=np.full(count, np.nan),
        devices={device.name: device},
    )


#: Kind, data type and dimensions of a program in the words of an operator table.
_Row = tuple[str, str, dict[str, int]]
_NOTHING: _Row = (UNKNOWN, "", {})

#: Kernels that pick by any index, not rows of a table by their numbers.
_INDEXED = frozenset({"torch.index"})
#: Products whose second operand lies along its columns, not along what is added up.
_COLUMNS_FIRST = frozenset(
    f"torch.{name}" for name in ("addmm", "mm", "matmul", "bmm", "baddbmm", "addbmm", "einsum")
)
#: Sums along rows are 0; what a sum's kernel says of others.
_SUMS = {BACKWARD: 1, CHANNEL_SUM: 2}
#: Norms whose rows are groups of channels.
_OF_GROUPS = ("group_norm", "instance_norm")
#: What the name of a kernel says: a convolution along a line.
_LINE = "conv1d"
#: Elements of an update are nearly all in tensors of round sizes, which kernels go through faster.
_ROUND = 64


def _published(row: _Row) -> _Row:
    """A row in the words of published tables, which say less of an operator and know fewer."""
    kind, dtype, dims = row
    # An index copies what it picks. A norm by channels goes through its values as a map does; a
    # layer norm of as many rows would take threads for each.
    if kind == "batchnorm" or (kind == "embedding" and dims["strided"]):
        size = {"rows": dims["rows"], "cols": dims["cols"]}
        return "elementwise", dtype, size | {"inputs": 1, "cost": 1}
    if kind == "pool_gradient":
        size = {"rows": dims["rows"], "cols": dims["cols"]}
        return "elementwise", dtype, size | {"inputs": 1, "cost": 1}
    if kind in ("reduction", "pool", "embedding", "embedding_gradient"):
        return _NOTHING
    if dims.get("groups", 1) > 1 or dims.get("line"):
        return _NOTHING
    if kind == "context_attention_gradient":
        return "context_attention", dtype, dims
    if kind in ("layernorm_gradient", "batchnorm_gradient"):
        size = {"rows": dims["rows"], "cols": dims["cols"]}
        return "elementwise", dtype, size | {"inputs": 2, "cost": 1}
    left_out = {
        "strided", "groups", "line", "channels_last", "turned", "bias", "broadcast", "converts",
        "rms", "masks", "training", "kernels", "longest", "function", "channels",
    }  # fmt: skip
    plain = dict.fromkeys(FAMILIES["conv"], "conv")
    return plain.get(kind, kind), dtype, {n: size for n, size in dims.items() if n not in left_out}


def _unpublished(row: _Row) -> bool:
    """Whether a map or an index goes through operands as published tables time none.

    In another order than they lie in, one again and again, or of many tensors in a few kernels.
    Carried from an H200's sweep, an H100's of large transposes and the like are 1.3 times off, as
    plain maps 2.0 to 2.9 times; updates of many small tensors 1.1 for 6 to 8.
    """
    kind, _, dims = row
    marks = ("strided", "broadcast", "kernels")
    return kind in ("elementwise", "embedding") and any(dims.get(name) for name in marks)


def _few_drawn(kind: str, dims: Mapping[str, int]) -> bool:
    """Whether sweeps inside CUDA graphs have too few: decoding with heads that share a cache."""
    return kind == "generation_attention" and dims["heads"] > dims["kv_heads"]


def _row(program: Program) -> _Row:
    """A program in the words of a table of torch's operators."""
    d, v = program.dims, program.variant
    if program.op == "linear":
        dtype = _LINEAR.get((v.storage, v.compute))
        dims = {"b": 1, "m": d["rows"], "n": d["n"], "k": d["k"], "turned": _turned(v.kernel)}
        return ("linear", dtype, dims) if dtype else _NOTHING
    if program.op.removesuffix("_gradient") in ("attention", "full_attention"):
        dtype = _ATTENTION.get((v.storage, v.compute))
        kind = "generation_attention" if d["queries"] == 1 else "context_attention"
        if program.op.endswith("_gradient"):
            kind = "context_attention_gradient"
        # The tables' attention is causal; so many keys leave as many pairs as no mask does.
        more = (d["queries"] - 1) // 2 if program.op.startswith("full") else 0
        shape = {"b": d["batch"], "queries": d["queries"], "keys": d["keys"] + more}
        shape |= {name: d[name] for name in ("heads", "kv_heads", "head_dim")}
        mask = AttentionMask.of_kernel(v.kernel)
        shape |= mask.sizes(d["batch"], d["heads"]) if mask else {}
        return (kind, dtype, shape) if dtype else _NOTHING
    dtype = _WIDE.get(v.compute)
    if dtype is None:
        return _NOTHING
    if passes := _strided_passes(program):
        size = {"rows": d["rows"], "cols": d["cols"], "inputs": passes, "cost": 1}
        return "elementwise", dtype, size | MapKernel(0, MAP_FUNCTIONS["mul"])._asdict()
    if program.op in ("norm", "softmax"):
        batch = v.kernel.endswith("batch_norm")  # of which no channels are known
        kind = "softmax" if program.op == "softmax" else "batchnorm" if batch else "layernorm"
        of_squares = {"rms": int(v.kernel.endswith("rms_norm"))} if kind == "layernorm" else {}
        of_squares |= {"channels": 1} if v.kernel.endswith(_OF_GROUPS) else {}
        return kind, dtype, {"rows": d["rows"], "cols": d["cols"]} | of_squares
    if program.op == "matmul":
        size = {"b": d["batch"], "m": d["m"], "n": d["n"], "k": d["k"]}
        # A product alone is a layer's: libraries share out a long sum among multiprocessors. 40 of
        # an H200's sweeps are 7 % off so in the mean, and 15 % as a batch.
        kind = "linear" if d["batch"] == 1 else "bmm"
        return kind, dtype, size | {"turned": _turned(v.kernel)}
    if program.op == "batch_norm" or (program.op == "norm_gradient" and d["channels"] > 1):
        kind = "batchnorm" if program.op == "batch_norm" else "batchnorm_gradient"
        size = {name: d[name] for name in ("rows", "cols", "channels")}
        words = {"training": OF_BATCH, "channels_last": CHANNELS_LAST}
        return kind, dtype, size | {name: int(word in v.kernel) for name, word in words.items()}
    if program.op == "norm_gradient":
        size = {"rows": d["rows"], "cols": d["cols"], "channels": int(BY_GROUP in v.kernel)}
        return "layernorm_gradient", dtype, size
    if program.op == "conv":
        sizes = _conv_sizes(d, v.kernel)
        of = next((g for g in (INPUT_GRADIENT, WEIGHT_GRADIENT) if v.kernel.endswith(g)), "")
        return (f"conv{of}", dtype, sizes) if sizes else _NOTHING
    if program.op == "embedding_backward":
        size = {"rows": d["rows"], "cols": d["cols"], "values": d["vocab"]}
        return "embedding_gradient", dtype, size | {"strided": int(v.kernel in _INDEXED)}
    if pool := pool_row(program):
        return pool[0], dtype, pool[1]
    if program.op in ("reduction", "pool", "embedding"):
        size = {"rows": d["rows"], "cols": d["cols"]}
        if program.op == "embedding":
            return "embedding", dtype, size | {"strided": int(v.kernel in _INDEXED)}
        # A forward pass sums over neighbours or across them, a backward one as its kernel says.
        across = int(v.kernel.endswith(ACROSS))
        return "reduction", dtype, size | {"strided": _SUMS.get(v.kernel, across)}
    if program.op == "adamw":
        round_up = -(-d["parameters"] // _ROUND) * _ROUND
        packed = {name: d[name] for name in ("kernels", "longest")}
        return "elementwise", dtype, {"rows": 1, "cols": round_up, "inputs": 6, "cost": 12} | packed
    if program.op in ("elementwise", "dropout"):  # with its mask, as a sweep times it
        size = {"rows": d["rows"], "cols": d["cols"], "inputs": d.get("inputs", 1), "cost": 1}
        return "elementwise", dtype, size | map_kernel(program)._asdict()
    if program.op == "roll":
        size = {"rows": d["rows"], "cols": d["cols"], "inputs": 1, "cost": 1}
        return "elementwise", dtype, size | {"strided": 2, "broadcast": 0, "converts": 0}
    if program.op == "fill":  # as many bytes as a copy of half of them; no sweep has fills
        half = {"rows": d["rows"], "cols": -(-d["cols"] // 2), "inputs": 1, "cost": 1}
        marks = {"strided": 0, "broadcast": 0, "converts": 0, "function": MAP_FUNCTIONS["mul"]}
        return "elementwise", dtype, half | marks
    if program.op == "rope":
        wide = {"rows": d["rows"], "cols": d["heads"] * d["head_dim"], "inputs": 1, "cost": 6}
        return "elementwise", dtype, wide
    inputs = {"activation": 2 if v.kernel.endswith("_mul") else 1, "add": 2}.get(program.op)
    if inputs is None:
        return _NOTHING
    cost = 1 if program.op == "add" else 6
    return "elementwise", dtype, {"rows": d["rows"], "cols": d["cols"], "inputs": inputs,
                                  "cost": cost}  # fmt: skip


def _strided_passes(program: Program) -> int:
    """Tensors that a scan reads, or a softmax whose elements are no neighbours; 0 of all else.

    Such a softmax goes through memory three times and its gradient two, at little more than half of
    what maps reach (512 x 512 of a third of a cube, one H200: 57 and 61 us for 33 MiB).
    """
    kernel = program.variant.kernel
    if program.op == "reduction" and plain_kernel(kernel).removeprefix("torch.") in SCANS:
        return 1
    if not kernel.endswith(ACROSS):
        return 0
    return 5 if program.op == "softmax" else 4 if "softmax_backward" in kernel else 0


def _conv_sizes(d: dict[str, int], kernel: str) -> dict[str, int] | None:
    """A convolution in the tables' words, which know square ones and those along a line."""
    line = int(_LINE in kernel)
    extents = [d[name] for name in ("inputs", "outputs", "taps")]
    size, out, window = extents if line else map(math.isqrt, extents)
    if not line and (size**2 != d["inputs"] or window**2 != d["taps"]):
        return None
    stride = max(1, round(size / out))
    padding = max(0, ((out - 1) * stride + window - size + 1) // 2)
    return {"b": d["batch"], "cin": d["cin"], "cout": d["cout"], "window": window, "size": size,
            "stride": stride, "padding": padding, "groups": d["groups"], "line": line,
            "channels_last": int(CHANNELS_LAST in kernel),
            "bias": int(kernel.endswith(BIAS))}  # fmt: skip


def _turned(kernel: str) -> int:
    """How a product's operands lie, as `operator_table.KINDS` says it."""
    if kernel.endswith(WEIGHT_GRADIENT):
        return 2
    forward = kernel.removesuffix(INPUT_GRADIENT)
    return int((forward in _COLUMNS_FIRST) != (forward != kernel))
