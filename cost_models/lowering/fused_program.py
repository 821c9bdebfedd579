"""`fused_program`: a compiler's kernel as a `Program`, and the kernels that it costs as much as.

No sweep timed such kernels. They move bytes as torch's own do: one that takes sums of rows costs
what a norm of these rows does, and a map of what it moves beside; one that draws numbers costs
dropout, and a map; every other one a map.
"""

from __future__ import annotations

from foreplan.cost_models.lowering.fused_kernels import FusedKernel
from foreplan.datasets.dtypes import DTYPE_BYTES
from foreplan.datasets.graphs.operator_call import dtype_name
from foreplan.datasets.operators import OF_BATCH
from foreplan.datasets.program import Program, Variant, program

#: The operator, and the kernel of the map that it costs.
FUSED, MAP = "fused", "torch.fused"
#: What the name of its kernel says: sums of rows, numbers drawn, tensors put together, one padded.
_SUMS, _DRAWN, _JOINED, _PADDED = "_sums", "_drawn", "_joined", "_padded"
#: How many times its bytes a map takes that puts tensors together, or pads one, as each thread asks
#: for all of them. Chosen on profiles of one H200 (exploratory; stored files keep no kernel's
#: name): 3.4 and 2.7 of two rotations of Llama's heads, 1.3 to 2.0 of six padded maps of
#: MobileNetV2.
_SLOWER = {_JOINED: 2.9, _PADDED: 1.4}
#: Rows of a norm below so many elements share a block, unlike those of torch's own (assumed).
_SHORT_ROW = 1024
#: Small kernels that statistics of a batch end in: sums of the blocks' sums, and what goes on with
#: them (running statistics; a weight's gradient in another layout). Of ResNet's and MobileNetV2's
#: steps, by how many short kernels the same profiles have to a norm.
_ENDS = 2
#: Most operands that the map is said to read (assumed).
_MOST_INPUTS = 4


def fused_program(
    kernel: FusedKernel, read_bytes: float, written_bytes: float, *, forward: bool = True
) -> Program:
    """A kernel, or its backward pass, by what it moves.

    Args:
        kernel: what it computes.
        read_bytes: that it reads.
        written_bytes: that it writes.
        forward: numbers are drawn in the forward pass alone.
    """
    dtype = dtype_name(kernel.dtype)
    dtype = dtype if dtype in DTYPE_BYTES else "int8"
    rows = max(1, kernel.rows)
    words = _SUMS * bool(kernel.rows) + _DRAWN * (kernel.drawn and forward)
    words += _JOINED if kernel.joined else _PADDED * kernel.padded
    words += OF_BATCH * kernel.split
    moved = (read_bytes + written_bytes) / DTYPE_BYTES[dtype]
    return program(
        FUSED, Variant(dtype, dtype, MAP + words), rows=rows,
        cols=max(1, kernel.elements // rows), moved=max(1, round(moved)),
        inputs=max(1, min(_MOST_INPUTS, round(read_bytes / max(1.0, written_bytes)))),
    )  # fmt: skip


def fused_parts(item: Program) -> list[tuple[Program, int]]:
    """Kernels of torch that cost as much, and how often each.

    Args:
        item: from `fused_program`.
    """
    d, variant, kernel = item.dims, item.variant, item.variant.kernel
    plain = Variant(variant.storage, variant.compute, MAP)
    moved = float(d["moved"])
    if _SUMS not in kernel:
        moved *= next((times for word, times in _SLOWER.items() if word in kernel), 1.0)
    elements = d["rows"] * d["cols"]
    once = 2 * elements  # that a norm or dropout reads and writes
    parts: list[tuple[Program, int]] = []
    if _SUMS in kernel and OF_BATCH not in kernel and moved >= once:
        norm = Variant(variant.storage, variant.compute, "torch.layer_norm")
        cols = max(d["cols"], min(_SHORT_ROW, elements))
        parts.append((program("norm", norm, rows=max(1, elements // cols), cols=cols), 1))
        moved -= once
    if _DRAWN in kernel:
        drawn = Variant(variant.storage, variant.compute, "torch.dropout")
        parts.append((program("dropout", drawn, rows=d["rows"], cols=d["cols"]), 1))
        moved = max(0.0, moved - once)
    left = round(moved / (d["inputs"] + 1))
    if left or not parts:
        size = {"rows": 1, "cols": max(1, left), "inputs": d["inputs"]}
        parts.append((program("elementwise", plain, **size), 1))
    if OF_BATCH in kernel:
        ends = Variant("fp32", "fp32", MAP)
        parts.append((program("elementwise", ends, rows=1, cols=d["rows"], inputs=2), _ENDS))
    return parts
