"""`prompt_s`: seconds of TensorRT-LLM's attention of prompts, as aiconfigurator's loop times it.

Before its kernel of attention that library runs two others: one fills in positions, one rotates
queries and keys and writes the cache, so that operands go through memory once more (its
``attentionOp.cpp``). A block of the third takes up to 128 queries of one head. What it spends on
its own, on loads and on waiting for them, is a number of cycles, whatever the matrix units can do.

Shape legend: ``N`` rows of a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.operators.idle_kernel import USUAL_CLOCK_HZ, idle_kernel_s
from foreplan.cost_models.operators.memory_time import memory_time
from foreplan.cost_models.operators.operator_work import OperatorWork, visible_pairs, widths
from foreplan.datasets.sweeps.operator_table import OperatorTable

Floats = NDArray[np.float64]

#: Kernels before that of attention (``theory``).
_BEFORE = 2

#: Queries of a block, and of a tile that is computed whole (assumed; keys likewise).
_BLOCK, _TILE = 128, 64

#: Cycles of a multiprocessor for a block, a number of a head. Fitted by eye on A100 and H100
#: (5,900 and 4,500 for heads of 128, 2,000 for heads of 64).
_CYCLES = 38.0


def is_timed_prompt(table: OperatorTable) -> NDArray[np.bool_]:
    """Rows of TensorRT-LLM's attention of prompts (N,)."""
    return np.asarray((table.kind == "context_attention") & (table.library == "trtllm"))


def prompt_s(table: OperatorTable, work: OperatorWork, offer: Mapping[str, Floats]) -> Floats:
    """Seconds beside an idle kernel's (N,).

    Args:
        table: rows of attention (N,); of others than `is_timed_prompt` it says nothing.
        work: of the rows.
        offer: figures of the rows' devices by name, ``clock`` and ``l2`` among them (N,) each.
    """
    d, (act, cache) = table.dims, widths(table)
    both = d["heads"] + 2 * d["kv_heads"]
    written = d["heads"] * act + 2 * d["kv_heads"] * cache
    rotated = d["b"] * d["queries"] * d["head_dim"] * (both * act + written)
    before = memory_time(table, replace(work, bytes=rotated), offer)

    blocks = np.ceil(d["queries"] / _BLOCK)
    rows = np.ceil(d["queries"] / _TILE) * _TILE / blocks
    # Keys that any query of a block sees: a window has one more at either end.
    sliding = (d["window"] > 0) & (d["window"] < d["keys"])
    keys = visible_pairs(d) / d["queries"] + np.where(sliding, 2, 1) * _TILE
    flops = 4 * rows * keys * d["head_dim"]
    clock = np.nan_to_num(offer["clock"], nan=USUAL_CLOCK_HZ)
    one = _CYCLES * d["head_dim"] / clock + flops * work.units / work.peak
    turns = np.ceil(d["b"] * d["heads"] * blocks / work.units)
    before = before + _BEFORE * idle_kernel_s(offer["clock"])
    return np.asarray(before + memory_time(table, work, offer) + turns * one)
