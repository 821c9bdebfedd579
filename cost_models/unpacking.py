"""`unpacked_weights`: what kernels write out before they multiply by a quantised weight."""

from __future__ import annotations

from foreplan.datasets.experts import touched_experts
from foreplan.datasets.kernels import FEW_ROWS
from foreplan.datasets.program import DTYPE_BYTES, Program

#: Kernels that make the whole weight in the compute dtype first, and those that do for many rows.
_KERNELS = ("dequant_linear", "unpack_linear", "upcast_linear")
_FOR_MANY_ROWS = "fragment_linear"


def unpacked_weights(program: Program) -> float:
    """Elements of the weight that a program's kernel writes out; 0 for a fused kernel."""
    d, kernel = program.dims, program.variant.kernel
    many = kernel.endswith(_FOR_MANY_ROWS) and d["rows"] > FEW_ROWS
    if not (many or kernel.endswith(_KERNELS)):
        return 0.0
    if program.op == "linear":
        return float(d["n"] * d["k"])
    if program.op == "experts":
        weights = 3 * d["ffn"] * d["hidden"]
        return weights * touched_experts(d["rows"], d["experts"], d["active"])
    return 0.0


def unpacking_bytes(program: Program) -> float:
    """Fewest bytes that this moves beside `Program.bytes`: written once, read once.

    Kernels that shift, mask and scale one after another move several times that: decoding with
    them took 9-13 times what the packed bytes alone say (two H200, docs/results/h200.md).
    """
    return 2.0 * DTYPE_BYTES[program.variant.compute] * unpacked_weights(program)
