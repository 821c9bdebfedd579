"""`prompt_s`: seconds of TensorRT-LLM's attention of prompts, as aiconfigurator's loop times it.

Before its kernel of attention that library runs two others: one fills in positions, one rotates
queries and keys and writes the cache (its ``attentionOp.cpp``), so that operands go through memory
once more. The third is FlashAttention. A block takes some queries of one head through the keys that
they see, tile by tile, and computes whole tiles. Which tiles is written down: `_tiles`.

For each pair of a query and a key a block multiplies, on matrix units, and takes an exponential. A
multiprocessor takes 16 of these a cycle, which is as long as half the products of a head of 64 on
an H100. Most kernels do one after the other. Hopper's has two groups of warps, and one multiplies
while the other takes exponentials (Shah et al., FlashAttention-3, 2024).

Shape legend: ``N`` rows of a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.operators.idle_kernel import USUAL_CLOCK_HZ, idle_kernel_s
from foreplan.cost_models.operators.memory_time import kept_time
from foreplan.cost_models.operators.operator_work import (
    PRECISIONS,
    OperatorWork,
    visible_pairs,
    widths,
)
from foreplan.cost_models.operators.power_limit import sustained_share
from foreplan.datasets.device import Device
from foreplan.datasets.sweeps.operator_table import OperatorTable

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

#: Kernels before that of attention (``theory``).
_BEFORE = 2

#: Compute capabilities of the A100 and of Hopper, which have kernels of their own (``theory``).
_AMPERE, _HOPPER = 8.0, 9.0

#: Numbers of a head up to which tiles are larger, and keys up to which an A100 takes smaller ones
#: and Hopper, for such heads, a kernel without groups of warps, which goes through whole sequences
#: of 64, 128 or 256 keys whatever the mask (``theory``, ``fmha_v2/setup.py``, ``fmhaRunner.cpp``).
_SMALL_HEAD, _SHORT, _SHORT_ON_HOPPER = 64, 64, 256

#: Exponentials of a multiprocessor in a cycle (``theory``, CUDA C++ Programming Guide).
_EXPONENTIALS = 16.0

#: Cycles that 64 queries of a head wait beside their tiles, share of them that is left where other
#: blocks take turns, share of the peak and of the exponentials that is reached, and how much longer
#: than its bytes the kernel before takes. ``fitted`` on rows of 16 bits; two of three chips say
#: 4,030-4,910; 0.71-0.84; 0.56-0.60; 1.13-1.28 (docs/results/operators_history.md).
_WAIT, _LEFT, _REACHED, _ROTATING = 4600.0, 0.75, 0.585, 1.2

#: Power of the share that a board's power limit leaves of its peak. Assumed: half, as what units
#: spend goes with how busy they are.
_LIMITED = 0.5


def is_timed_prompt(table: OperatorTable) -> Flags:
    """Rows of TensorRT-LLM's attention of prompts (N,)."""
    return np.asarray((table.kind == "context_attention") & (table.library == "trtllm"))


def takes_turns(device: Device) -> bool:
    """Whether products and exponentials take turns on a device: before Hopper, or not known."""
    known = device.compute_capability if device.kind == "cuda" else None
    return not float(known or "nan") >= _HOPPER


def multiplies_narrow(dtype: str) -> bool:
    """Whether products of rows of a known data type are of 8 bits."""
    return PRECISIONS[dtype].compute[0] == "fp8"


def prompt_s(table: OperatorTable, work: OperatorWork, offer: Mapping[str, Floats]) -> Floats:
    """Seconds beside an idle kernel's (N,).

    Args:
        table: rows of attention (N,); of others than `is_timed_prompt` it says nothing.
        work: of the rows.
        offer: figures of the rows' devices by name, ``clock``, ``l2`` and ``capability`` among
            them (N,) each.
    """
    d = table.dims
    queries, step, together = _tiles(table, offer["capability"])
    sliding = (d["window"] > 0) & (d["window"] < d["keys"])
    # Keys that any query of a block sees, in whole tiles: half a tile lies behind the mask, and
    # before a window as well. Blocks begin where tiles do.
    ends = np.where(sliding, 1.0, 0.5)
    keys = visible_pairs(d) / d["queries"] + ends * np.minimum(queries, d["queries"])
    keys = keys + ends * np.maximum(step - np.where(sliding, 0, queries), 0)
    all_keys = np.ceil(d["keys"] / step) * step
    keys = np.clip(keys, step, all_keys)
    # The last block sees most of them.
    most = np.minimum(np.where(sliding, d["window"] + queries, all_keys), all_keys)
    most = np.ceil(most / step) * step

    clock = np.nan_to_num(offer["clock"], nan=USUAL_CLOCK_HZ)
    products = 4 * queries * d["head_dim"] * work.units / work.peak
    exponentials = queries / _EXPONENTIALS / clock
    a_key = np.where(together, np.maximum(products, exponentials), products + exponentials)
    a_key = a_key / (_REACHED * sustained_share(work, offer, _LIMITED))
    wait = _WAIT * queries / 64 / clock
    turns = np.ceil(d["b"] * d["heads"] * np.ceil(d["queries"] / queries) / work.units)
    blocks = np.maximum(wait + a_key * most, turns * (_LEFT * wait + a_key * keys))
    rotated, attended = _memory_s(table, work, offer)
    fixed = _BEFORE * idle_kernel_s(offer["clock"])
    return np.asarray(fixed + _ROTATING * rotated + np.maximum(attended, blocks))


def _tiles(table: OperatorTable, capability: Floats) -> tuple[Floats, Floats, Flags]:
    """Queries of a block, keys of a tile, and whether products run beside exponentials (N,).

    From ``fmha_v2/setup.py`` and ``fmhaRunner.cpp`` of the library. GPUs behind Hopper, of whose
    kernels nothing was read, are taken to have its.
    """
    d, narrow = table.dims, _narrow(table)
    small, hopper = d["head_dim"] <= _SMALL_HEAD, capability >= _HOPPER
    tiled = (capability == _AMPERE) & ~narrow & (d["keys"] > _SHORT)
    wide = tiled | (~hopper & narrow & small)
    alone = hopper & ~narrow & small & (d["keys"] <= _SHORT_ON_HOPPER)
    together = np.asarray(hopper & ~alone)
    queries = np.where(together | (wide & small), 128.0, 64.0)
    step = np.where(together, np.where(small | narrow, 256.0, 128.0), np.where(wide, 128.0, 32.0))
    sequence = np.maximum(2 ** np.ceil(np.log2(d["keys"])), 64)
    return queries, np.where(alone, sequence, step), together


def _memory_s(
    table: OperatorTable, work: OperatorWork, offer: Mapping[str, Floats]
) -> tuple[Floats, Floats]:
    """Seconds in which operands of the last two kernels move (N,) each.

    All of it stays in L2 as long as what comes first does, queries, keys and values as they are
    before they are rotated: every call of the loop has the same.
    """
    d, (act, cache) = table.dims, widths(table)
    tokens = d["b"] * d["queries"] * d["head_dim"]
    both = d["heads"] + 2 * d["kv_heads"]
    kept = np.where(_narrow(table), 1.0, act)
    first = tokens * both * act
    written = tokens * (d["heads"] * kept + 2 * d["kv_heads"] * cache)
    attended = tokens * (both + d["heads"]) * kept
    rotating, attending = (replace(work, bytes=moved) for moved in (first + written, attended))
    return kept_time(rotating, offer, first), kept_time(attending, offer, first)


def _narrow(table: OperatorTable) -> Flags:
    """Rows whose products are of 8 bits (N,)."""
    known = {name: name in PRECISIONS and multiplies_narrow(name) for name in set(table.dtype)}
    return np.array([known[name] for name in table.dtype], dtype=bool)
