"""What unpacking a quantised weight or cache costs: written out first, or in registers."""

from __future__ import annotations

from types import MappingProxyType

from foreplan.datasets.device import Device
from foreplan.datasets.dtypes import DTYPE_BYTES
from foreplan.datasets.experts import EXPERT_OPERATORS, touched_experts
from foreplan.datasets.kernels.registry import ROWS_A_CALL, writes_weight
from foreplan.datasets.kernels.row_shapes import row_seconds, takes_blocks
from foreplan.datasets.kernels.token_shapes import attends_at_once
from foreplan.datasets.operators import ATTENTIONS
from foreplan.datasets.program import Program

#: Kernels that make the whole weight or cache in the compute dtype first, and those that do so for
#: many rows.
_KERNELS = (
    "dequant_linear", "unpack_linear", "upcast_linear", "dequant_sdpa", "dequant_sink_sdpa",
    "dequant_capped_bmm",
)  # fmt: skip
_FOR_MANY_ROWS = "fragment_linear"
#: Of those the one of a single weight, which has blocks for tens of rows.
_OF_ONE_WEIGHT = "foreplan.fragment_linear"
_BITS = MappingProxyType({"int4": 4, "int8": 8})

#: Seconds of one multiprocessor in which a fused kernel gets through a value of the weight, by
#: storage and rows of a call: its time at 8192 x 8192 on a whole H200 of 132 (`measured`: 14.2,
#: 16.8 and 27.8 us with int4, 24.2 with int8 and 32 rows, docs/results/kernels.md). With 8 and 16
#: rows int8 is bound by memory there (67 MB in 19.2 us), which says nothing of multiprocessors:
#: taken is what 32 rows take less what these spare int4, 26.8 and 21.7 (`theory`: the same matrix
#: instructions). Slices of 66 and 32 agree within 45 % (docs/results/h200_history.md). Other chips'
#: instruction rates differ.
_UNIT_S_A_VALUE = MappingProxyType({
    "int4": MappingProxyType({8: 27.9e-12, 16: 33.0e-12, 32: 54.7e-12}),
    "int8": MappingProxyType({8: 20.8e-12, 16: 25.9e-12, 32: 47.6e-12}),
})  # fmt: skip
#: The same of a fused kernel for many rows, which writes the weight out: what it takes longer than
#: bf16 at 4096 x 14336 and 512 rows on the whole chip (`measured`: 63 and 59 us,
#: docs/results/h200_history.md). Slices of 66 and 32 agree within 12 %.
_UNIT_S_A_WRITTEN_VALUE = MappingProxyType({"int4": 142e-12, "int8": 133e-12})
#: Of torch's operators that shift, mask and scale values of 4 bits one after another: their start,
#: and seconds of one multiprocessor a value (``measured``: 1 to 34 million values on the whole
#: chip, 24-362 us, 2026-11-29).
_BY_TORCH, _BY_TORCH_S, _UNIT_S_BY_TORCH = "int4/bf16/torch.dequant_linear", 10e-6, 1.2e-9
_MEASURED_CHIP = "gh100"


def unpacked_weights(program: Program, figures: Device | None = None) -> float:
    """Elements of a weight, or of keys and values, that are written out; 0 for a fused kernel.

    Args:
        program: any.
        figures: of its device; ``None`` = of one without blocks for tens of rows.
    """
    d, kernel = program.dims, program.variant.kernel
    if program.op in ATTENTIONS and reads_as_it_is(program, figures):
        return 0.0
    if not (writes_out(program, figures) or kernel.endswith(_KERNELS)):
        return 0.0
    if program.op == "linear":
        return float(d["n"] * d["k"])
    if program.op in ATTENTIONS:
        return 2.0 * d["batch"] * d["keys"] * d["kv_heads"] * d["head_dim"]
    if program.op in EXPERT_OPERATORS:
        weights = 3 * d["ffn"] * d["hidden"]
        return weights * touched_experts(d["rows"], d["experts"], d["active"])
    return 0.0


def reads_as_it_is(program: Program, figures: Device | None) -> bool:
    """Whether a GPU's attention of one new token reads the cache as it lies."""
    if figures is None or figures.kind != "cuda":
        return False
    d, capability = program.dims, figures.compute_capability
    return attends_at_once(d["queries"], d["head_dim"], program.variant.compute, capability)


def unpacking_bytes(program: Program, figures: Device | None = None) -> float:
    """Fewest bytes that this moves beside `Program.bytes`: written once, read once.

    Kernels that shift, mask and scale one after another move several times that: decoding with
    them took 9-13 times what the packed bytes alone say (two H200, docs/results/h200_history.md).
    Arguments as of `unpacked_weights`.
    """
    return 2.0 * DTYPE_BYTES[program.variant.compute] * unpacked_weights(program, figures)


def unpacking_floor_s(program: Program, figures: Device) -> float:
    """Least seconds of a fused kernel for few or tens of rows, which unpacks in registers.

    Memory does not bound it where few multiprocessors stand before much bandwidth, as on slices.
    0 for others, and on chips where this was not measured.
    """
    storage, rows = program.variant.storage, program.dims.get("rows", 0)
    if not _measured(program, figures):
        return 0.0
    if in_blocks(program, figures):
        n, k = program.dims["n"], program.dims["k"]
        return row_seconds(_BITS[storage], rows, n, k, figures.units or 1)
    if writes_out(program, figures):
        return 0.0
    by_rows = _UNIT_S_A_VALUE[storage]
    calls, rest = divmod(rows, ROWS_A_CALL)
    unit_s = calls * by_rows[ROWS_A_CALL]
    if rest:
        unit_s += by_rows[min(size for size in by_rows if rest <= size)]
    return program.dims["n"] * program.dims["k"] * unit_s / (figures.units or 1)


def in_blocks(program: Program, figures: Device | None) -> bool:
    """Whether a fused kernel multiplies tens of rows by blocks, without writing the weight out."""
    if program.variant.kernel != _OF_ONE_WEIGHT or figures is None:
        return False
    rows = program.dims["rows"]
    return rows > ROWS_A_CALL and takes_blocks(rows, figures.compute_capability)


def writes_out(program: Program, figures: Device | None = None) -> bool:
    """Whether a fused kernel has so many rows that it unpacks once and multiplies in bf16.

    Arguments as of `unpacked_weights`.
    """
    fused = program.variant.kernel.endswith(_FOR_MANY_ROWS)
    capability = None if figures is None else figures.compute_capability
    if program.variant.kernel != _OF_ONE_WEIGHT:
        capability = None
    return fused and writes_weight(program.dims["rows"], capability)


def writing_s(program: Program, figures: Device) -> float | None:
    """Seconds in which a weight is written out, by a fused kernel for many rows or by torch.

    ``None`` for kernels that do not, for torch's of 8 bits, whose bytes say it, and on chips where
    this was not measured.
    """
    known = figures.chip == _MEASURED_CHIP and figures.units is not None
    if program.op == "linear" and known and str(program.variant) == _BY_TORCH:
        return _BY_TORCH_S + unpacked_weights(program) * _UNIT_S_BY_TORCH / (figures.units or 1)
    if not writes_out(program, figures) or not _measured(program, figures):
        return None
    unit_s = _UNIT_S_A_WRITTEN_VALUE[program.variant.storage]
    return unpacked_weights(program) * unit_s / (figures.units or 1)


def _measured(program: Program, figures: Device) -> bool:
    """Whether the constants above hold for a program on a device."""
    fused = program.op == "linear" and program.variant.kernel.endswith(_FOR_MANY_ROWS)
    known = figures.chip == _MEASURED_CHIP and figures.units is not None
    return fused and known and program.variant.storage in _UNIT_S_A_VALUE
