"""`decoding_s`: seconds of TensorRT-LLM's decoding attention, as aiconfigurator's loop times it.

That library has two kernels (``decoderXQAImplJIT.cpp``, ``kernelUtils.cpp``). One, here *shared*,
reads a cache once for all heads that share it: for 2 to 32 heads, where its blocks, one for each
sequence, head of the cache and 128 tokens of it, are enough for a quarter of the multiprocessors.
Else one block a sequence and head goes through that head's keys and then its values, *by head*, and
spends cycles on every number, as it uses no matrix units, and more where it has to widen them.
Caches of 8 bits are not cut into blocks of tokens, but on Hopper, whose shared kernel for them
multiplies them as they are and runs two or three blocks at once (``attentionOp.cpp``).

The loop (``collector/trtllm/collect_attn.py``) makes a cache of keys alone, from whose bytes values
are read as well. So half of a cache is all that memory, or L2 from call to call, has to hold.

Shape legend: ``N`` rows of a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.operators.idle_kernel import USUAL_CLOCK_HZ, idle_kernel_s
from foreplan.cost_models.operators.memory_time import memory_time
from foreplan.cost_models.operators.operator_work import OperatorWork, widths
from foreplan.datasets.sweeps.operator_cases import RECORDED
from foreplan.datasets.sweeps.operator_table import OperatorTable

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

#: Compute capability of the GPUs that cut 8-bit caches and multiply them as they are (``theory``).
HOPPER = 9.0

#: Most heads of a group, tokens of a block, share of the multiprocessors from which the shared
#: kernel runs, and blocks of one that are made at most (``theory``, ``decoderXQAConstants.h``).
_MOST_SHARED, _BLOCK_TOKENS, _LEAST_WAVE, _MOST_WAVES = 32, 128, 0.25, 8.0

#: Cycles of a multiprocessor for a block by head, and numbers of keys and values that it takes in a
#: cycle. Fitted by eye on 16-bit caches: A100, H100 and L40S alike (2,500-2,900; 13, 15 and 10).
_BLOCK_CYCLES, _NUMBERS_A_CYCLE = 2600.0, 13.0

#: Cycles of a block of the shared kernel, and bytes that it takes in a cycle; numbers of 8 bits are
#: widened first, but on Hopper. Fitted by eye on 16-bit caches of an H100; an A100's are 10,000 and
#: 66, and serve as well (docs/results/operators_history.md).
_SHARED_CYCLES, _SHARED_BYTES = 8500.0, 34.0

#: Blocks of Hopper's shared kernel for 8-bit caches that a multiprocessor holds: 3 as long as heads
#: of a group, in eights, by numbers of a head are at most this many, else 2; one of any other
#: (``theory``, launch bounds of ``mha_sm90.cu`` and ``mha.cu``).
_THREE_BLOCKS = 2048

#: Conversions that a number of 8 bits takes on its way to one of 16: to 16, 32 and 16 bits again
#: (``theory``, ``cudaTypeUtils.cuh``), how many of them a multiprocessor does in a cycle before
#: Hopper (``theory``, CUDA C++ Programming Guide) and on it (assumed; from 39 on they do not show,
#: nor do they in an H100's rows), and keys that a block goes through at least (in 16 bits, 16 keys
#: take as long as 64 on A100 and H100).
_CONVERSIONS, _CONVERTED, _CONVERTED_ON_HOPPER, _LEAST_KEYS = 3.0, 16.0, 64.0, 64.0

#: Kernels before the shared one, which fill in positions and rotate; Hopper's for 8-bit caches does
#: so itself (``theory``).
_BEFORE = 2

#: Share of the memory's bandwidth that is reached, as in `memory_time`.
_REACHED = 0.85

#: Blocks by head that are under way at once on a multiprocessor, so that one alone takes as long as
#: so many, and tokens from which one is cut into as many as there are multiprocessors for. Assumed.
_RESIDENT, _CUT = 4.0, 512


def is_timed_by_loop(table: OperatorTable) -> Flags:
    """Rows of TensorRT-LLM's decoding (N,)."""
    return np.asarray((table.kind == "generation_attention") & (table.library == "trtllm"))


def by_head(table: OperatorTable, work: OperatorWork, offer: Mapping[str, Floats]) -> Flags:
    """Rows of a decoding that runs by head (N,)."""
    d = table.dims
    group, parts = d["heads"] / d["kv_heads"], np.floor(d["keys"] / _BLOCK_TOKENS)
    blocks = d["b"] * d["kv_heads"] * np.where(_whole(table, offer), 1.0, np.maximum(parts, 1))
    shared = (group > 1) & (group <= _MOST_SHARED) & (blocks >= _LEAST_WAVE * work.units)
    return np.asarray(~shared)


def decoding_s(table: OperatorTable, work: OperatorWork, offer: Mapping[str, Floats]) -> Floats:
    """Seconds beside an idle kernel's (N,).

    Args:
        table: rows of attention (N,); of others than `is_timed_by_loop` it says nothing.
        work: of the rows.
        offer: figures of the rows' devices by name, ``clock``, ``l2`` and ``capability`` among
            them (N,) each.
    """
    d = table.dims
    kept = memory_time(table, replace(work, bytes=work.bytes / 2), offer)
    seen = np.where(d["window"] > 0, np.minimum(d["keys"], d["window"] + 1), d["keys"])
    hertz = work.units * np.nan_to_num(offer["clock"], nan=USUAL_CLOCK_HZ)

    caches = d["b"] * d["kv_heads"]
    parts = np.minimum(np.floor(seen / _BLOCK_TOKENS), np.floor(_MOST_WAVES * work.units / caches))
    parts = np.where(_whole(table, offer), 1.0, np.maximum(parts, 1))
    narrow = (widths(table)[1] < 2) & (offer["capability"] == HOPPER)
    bytes_seen = 2 * d["head_dim"] * seen / parts * np.where(narrow, 1, 2)
    eights = np.ceil(d["heads"] / d["kv_heads"] / 8) * 8
    held = np.where(eights * d["head_dim"] <= _THREE_BLOCKS, 3.0, 2.0)
    # Blocks that a multiprocessor holds at once wait for the same while.
    waits = np.maximum(caches * parts / np.where(narrow, held, 1.0), work.units) * _SHARED_CYCLES
    reads = np.maximum(caches * parts, work.units) * bytes_seen / _SHARED_BYTES
    shared = np.maximum(kept, (waits + reads) / hertz)
    shared = shared + np.where(narrow, 0, _BEFORE) * idle_kernel_s(offer["clock"])

    blocks = d["b"] * d["heads"]
    pieces = np.where(seen >= _CUT, np.maximum(np.floor(work.units / blocks), 1), 1.0)
    cycles = _BLOCK_CYCLES + 2 * d["head_dim"] * seen / pieces / _NUMBERS_A_CYCLE
    longer = np.maximum(seen / pieces, _LEAST_KEYS) * _converting(table, offer)
    cycles = cycles + 2 * d["head_dim"] * longer
    # Values are found in L2 as far as it holds the keys that blocks under way have read.
    under_way = np.minimum(_RESIDENT * work.units / blocks, 1.0) * work.bytes / 2
    again = np.nan_to_num(1 / (1 + 0.75 * offer["l2"] / under_way), nan=1.0)
    turns = np.maximum(blocks * pieces, _RESIDENT * work.units)
    alone = np.maximum(kept * (1 + again), turns * cycles / hertz)
    return np.asarray(np.where(by_head(table, work, offer), alone, shared))


def caches_s(table: OperatorTable, bandwidth: float | None) -> Floats:
    """Seconds in which memory hands over the keys and values that decoding reads (N,).

    A pass reads both, and so much else before it reads them again that L2 keeps none. The loop has
    neither. 0 of other rows, of our own sweeps, which read as a pass does, and where the bandwidth
    is unknown.

    Args:
        table: rows that a plan asks for (N,).
        bandwidth: of the device's memory, bytes/s, of which 0.85 is reached (`memory_time`).
    """
    d = table.dims
    asked = (table.kind == "generation_attention") & [
        not name.startswith(RECORDED) for name in table.library
    ]
    if not bandwidth or not asked.any():
        return np.zeros(len(table))
    seen = np.where(d["window"] > 0, np.minimum(d["keys"], d["window"] + 1), d["keys"])
    moved = 2 * d["b"] * d["kv_heads"] * d["head_dim"] * seen * widths(table)[1]
    return np.asarray(np.where(asked, moved / (_REACHED * bandwidth), 0.0))


def _converting(table: OperatorTable, offer: Mapping[str, Floats]) -> Floats:
    """Cycles a number by which conversions outlast all else that a block by head does (N,)."""
    hopper = offer["capability"] == HOPPER
    cycles = _CONVERSIONS / np.where(hopper, _CONVERTED_ON_HOPPER, _CONVERTED)
    longer = np.maximum(cycles - 1 / _NUMBERS_A_CYCLE, 0)
    return np.asarray(np.where(widths(table)[1] < 2, longer, 0.0))


def _whole(table: OperatorTable, offer: Mapping[str, Floats]) -> Flags:
    """Rows whose caches are not cut into blocks of tokens (N,)."""
    return np.asarray((widths(table)[1] < 2) & (offer["capability"] != HOPPER))
