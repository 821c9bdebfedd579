"""What programs take by the kernels that they really are, where passes are replayed from graphs.

The tables that the predictor learnt from hold one fused kernel an operator in fp32, issued by a
host: whatever is shorter than half of that launch (`launch_head`) is hidden in it, so that nothing
there says what few rows take in a graph. Here a program is the kernels that the functions of
`foreplan.datasets.kernels.registry` run one after another (``theory``: read off those functions),
each

    t = fixed + max(bytes / bandwidth, elements * unit / units)

The second bound is of kernels over strides (a transpose, a broadcast), of which torch computes the
place of every element, and of those that round: their multiprocessors bound them, not memory, and
slices of a chip more than the whole. Every constant was ``measured`` on a whole H200 (torch 2.11,
rows replayed from graphs, 2026-11-22; maps of rows in one launch, `_row_maps`, 2026-11-30,
tests/benchmarks/row_maps_cuda.py) but where it says otherwise; how slices of 66 and 32
multiprocessors agree docs/results/h200_history.md shows. Where programs are issued by a
host, and on other chips, nothing here holds. Products of few rows are one kernel that streams its
weight, bound by memory or, fused, by unpacking (`unpacking`): no library's table has the fused
ones, and what 16, 8 and 4 bits cost has to be told by one measure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from foreplan.cost_models.costs import Estimate
from foreplan.cost_models.unpacking import in_blocks, reads_as_it_is, unpacking_floor_s
from foreplan.datasets.device import Device
from foreplan.datasets.dtypes import DTYPE_BYTES
from foreplan.datasets.kernels.registry import ROWS_A_CALL
from foreplan.datasets.kernels.token_shapes import token_seconds
from foreplan.datasets.program import Program

_MEASURED_CHIP = "gh100"

#: Seconds of a kernel that does next to nothing behind another of its kind: an addition of 2048
#: numbers (1.21 us), and a copy over strides.
_DENSE_S, _STRIDED_S = 1.2e-6, 1.9e-6
#: The same of a rotation, a gated activation, a cache written as it is and in 8 bits, and a norm.
_ROTATED_S, _GATED_S, _COPIED_S, _ROUNDED_S, _NORM_S = 1.65e-6, 1.8e-6, 1.45e-6, 1.93e-6, 1.65e-6
#: Of a product of few rows beside its weight's bytes: of cuBLAS's, and of cuBLAS's by the root of
#: inputs over features, as few features are few blocks, whose sums of parts of the inputs are added
#: up; of the fused ones, and of those an input, which a block goes through (``fitted``: 185
#: products of up to 32 rows on three H200s, 2026-11-29; within factors of 1.06, 1.11 with int4 and
#: 1.07 with int8 in the mean).
_PRODUCT_S, _SPLIT_S = 2.2e-6, 1.6e-6
_FUSED_S, _FUSED_INPUT_S = 1.8e-6, 0.19e-9
#: Of a product of more than few rows (``fitted``: 48 of 256 to 16384 rows of five small models on
#: three H200s, 5 us to 1.6 ms; 0.85 in the mean, within a factor of 1.05; 2026-11-30).
_RECORDED_PRODUCT = 0.85
#: Bytes a second of one multiprocessor for what the last-level cache holds, and the share of it
#: that operands and result may fill (``measured``, 2026-11-29: additions of 3 to 25 MB on 132).
_CACHED_RATE, _CACHED_SHARE = 72e9, 0.5
#: The same of rotations and gated activations (10 to 25 MB), and of norms.
_CACHED_MAP_RATE, _CACHED_NORM_RATE = 52e9, 36e9
#: Seconds of one multiprocessor for an element over strides (two kernels of torch's activation
#: of 8192 x 14336 take 624 us on 132), and for one that is rounded to 8 bits.
_UNIT_S_AN_ELEMENT, _UNIT_S_A_ROUNDED = 0.35e-9, 0.24e-9
#: Seconds in which a block of threads gets through an element of its row: of a norm, and of an
#: arg-max, of which 16 x 128256 take 28.4 us. One block has one row.
_NORM_ELEMENT_S, _ARGMAX_S = 0.1e-9, 0.21e-9
#: torch's layer norm: seconds of a block for an element, where 1 x 4096 take 4.4 us; the
#: least of a row, where 65536 rows of 128 take 41 us on 132 multiprocessors (2026-11-29); and rows
#: that one has at a time. On 132 of them 2048 rows of 4096 take 2.4 times what the first takes
#: beside its start, so two waves, which 8 to 15 give; of these the slices of 66 and 32 say 8.
_LAYER_NORM_S, _LAYER_NORM_ROW_S, _LAYER_NORM_ROWS = 0.78e-9, 0.64e-6, 8
#: Up to so many rows are gathered one after another (``theory``: ``indexSelectSmallIndex`` of
#: torch); seconds of each: 16 take 7.5 us.
_GATHERED, _GATHER_S = 16, 0.39e-6
#: Seconds that one query's attention takes for a key: 14.7 us for 543 of 128 features and 12.1 us
#: for 543 of 64; so a fixed part and one a feature.
_KEY_S, _KEY_FEATURE_S = 15.3e-9, 0.075e-9
#: From this share of the multiprocessors on, flash attention gives each sequence and head one block
#: (``theory``: its ``num_splits_heuristic``); below, keys are split among several.
_UNSPLIT = 0.8
#: Ends of the interval over the expectation (``fitted``: 5th and 95th percentile of time over price
#: of 660 rows, on the whole chip and on slices of it).
_SPREAD = (0.82, 1.47)


class Kernel(NamedTuple):
    """One kernel.

    Attributes:
        bytes: that it moves.
        start_s: seconds if it did nothing.
        cached_rate: bytes a second of one multiprocessor where the last-level cache holds them; 0
            of a kernel whose operands or results it does not hold.
        unit_s: seconds of one multiprocessor, if these bound it.
    """

    bytes: float
    start_s: float = _DENSE_S
    cached_rate: float = _CACHED_RATE
    unit_s: float = 0.0


def _strided(elements: float, moved: float) -> Kernel:
    return Kernel(moved, _STRIDED_S, 0.0, elements * _UNIT_S_AN_ELEMENT)


def replayed(program: Program, figures: Device, switch_s: float) -> Estimate | None:
    """Price a program that is replayed from a graph behind another program.

    Args:
        program: any program.
        figures: of its device; of a product with the bandwidth of memory that is only read.
        switch_s: seconds from one program to the next (``Profile.switch_s``).

    Returns:
        ``None`` where the kernels are not known, or on a chip where they were not measured.
    """
    if figures.chip != _MEASURED_CHIP or not figures.units or not figures.memory_bandwidth:
        return None
    found = _seconds(program, figures, figures.units)
    if found is None:
        return None
    low, high = (share * found for share in _SPREAD)
    return Estimate(found + switch_s, low + switch_s, high + switch_s, "predicted")


def recorded_share(program: Program, figures: Device) -> float:
    """Of a sweep's time, what a product of more than few rows takes in a recorded pass; else 1.

    Its input was just written, where a sweep's comes from memory.
    """
    plain = program.op == "linear" and str(program.variant) == "bf16/bf16/torch.linear"
    if figures.chip != _MEASURED_CHIP or not plain or program.dims["rows"] <= ROWS_A_CALL:
        return 1.0
    return _RECORDED_PRODUCT


def cache_unpacking_s(program: Program, figures: Device) -> float | None:
    """Seconds in which attention makes keys and values of a cache of 8 bits first.

    ``None`` for other programs and on chips where it was not measured.
    """
    if program.op != "attention" or not program.variant.kernel.endswith("dequant_sdpa"):
        return None
    if figures.chip != _MEASURED_CHIP or not figures.units or not figures.memory_bandwidth:
        return None
    d, wide = program.dims, DTYPE_BYTES[program.variant.compute]
    codes = d["batch"] * d["keys"] * d["kv_heads"] * d["head_dim"]
    scales = codes / d["head_dim"]
    # `QuantisedCache.read` of each: both are cast, and the scale is broadcast.
    one = [
        _strided(codes, codes * (1 + wide)), _strided(scales, 2 * scales * wide),
        _strided(codes, 2 * codes * wide),
    ]  # fmt: skip
    return 2 * _total(one, figures, figures.units)


def attention_floor_s(program: Program, figures: Device) -> float:
    """Least seconds of attention of one query, which multiprocessors bound; 0 for other programs.

    Each sequence and key head has one block, which goes through its keys one after another. 0 too
    where keys are split, and on chips where this was not measured.
    """
    d = program.dims
    if program.op != "attention" or d["queries"] != 1 or program.variant.compute != "bf16":
        return 0.0
    blocks = d["batch"] * d["kv_heads"]
    if figures.chip != _MEASURED_CHIP or not figures.units or blocks < _UNSPLIT * figures.units:
        return 0.0
    key_s = _KEY_S + _KEY_FEATURE_S * d["head_dim"]
    return _DENSE_S + math.ceil(blocks / figures.units) * d["keys"] * key_s


def kernels(program: Program) -> list[Kernel]:
    """The kernels over single elements that a program is; none for any other program."""
    d, wide, name = program.dims, DTYPE_BYTES[program.variant.compute], program.variant.kernel
    if program.op == "rope":
        n = d["rows"] * d["heads"] * d["head_dim"]
        return [Kernel(2 * n * wide, _ROTATED_S, _CACHED_MAP_RATE)]
    if program.op == "cache_write":  # keys and values at once
        n = 2 * d["batch"] * d["tokens"] * d["kv_heads"] * d["head_dim"]
        if name == "torch.copy":
            return [Kernel(2 * n * wide, _COPIED_S, 0.0)]
        return [Kernel(n * (wide + 1), _ROUNDED_S, 0.0, n * _UNIT_S_A_ROUNDED)]
    if program.op == "norm" and name == "torch.rms_norm":
        start_s = _NORM_S + d["cols"] * _NORM_ELEMENT_S
        return [Kernel(program.bytes, start_s, _CACHED_NORM_RATE)]
    if program.op not in ("activation", "add", "cast"):
        return []
    if name.endswith("_mul"):
        return [Kernel(program.bytes, _GATED_S, _CACHED_MAP_RATE)]
    return [Kernel(program.bytes)]


def _seconds(program: Program, figures: Device, units: int) -> float | None:
    d, rate = program.dims, figures.memory_bandwidth
    assert rate is not None
    if program.op == "linear":
        unpacked_s = unpacking_floor_s(program, figures)
        if in_blocks(program, figures):  # the whole kernel's time
            return max(program.bytes / rate, unpacked_s)
        plain = str(program.variant) == "bf16/bf16/torch.linear" and d["rows"] <= ROWS_A_CALL
        if plain:
            return _PRODUCT_S + _SPLIT_S * math.sqrt(d["k"] / d["n"]) + program.bytes / rate
        if not unpacked_s:
            return None
        return _FUSED_S + _FUSED_INPUT_S * d["k"] + max(program.bytes / rate, unpacked_s)
    if program.op == "attention":
        return _token_seconds(program, rate, units) if reads_as_it_is(program, figures) else None
    if program.op == "norm" and program.variant.kernel == "torch.layer_norm":
        waves = math.ceil(d["rows"] / (_LAYER_NORM_ROWS * units))
        row_s = max(d["cols"] * _LAYER_NORM_S, _LAYER_NORM_ROW_S)
        return _DENSE_S + max(program.bytes / rate, waves * row_s)
    if program.op == "argmax":
        waves = math.ceil(d["rows"] / units)
        return _DENSE_S + max(program.bytes / rate, waves * d["cols"] * _ARGMAX_S)
    if program.op == "embedding":
        gathered = d["rows"] * _GATHER_S if d["rows"] <= _GATHERED else 0.0
        return _DENSE_S + max(program.bytes / rate, gathered)
    found = kernels(program)
    return _total(found, figures, units) if found else None


def _token_seconds(program: Program, rate: float, units: int) -> float:
    d = program.dims
    return token_seconds(
        d["batch"], d["heads"], d["kv_heads"], d["head_dim"], d["keys"],
        bits=8 if program.variant.storage == "int8" else 16, units=units, bandwidth=rate,
    )  # fmt: skip


def _total(found: Sequence[Kernel], figures: Device, units: int) -> float:
    rate = figures.memory_bandwidth
    assert rate is not None
    held = _CACHED_SHARE * (figures.l2_bytes or 0)
    total = 0.0
    for k in found:
        near = max(rate, k.cached_rate * units) if k.bytes <= held else rate
        total += k.start_s + max(k.bytes / near, k.unit_s / units)
    return total
