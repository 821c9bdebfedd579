"""`score_columns`: features of an attention's scores, where something is added to them.

Which of torch's kernels computes them (``sdp_utils.cpp``, 2.11; rows of the sweep): where keys of
a mask are no neighbours in memory, and where heads that share keys have a learned mask or FP32
operands, none of the fused ones does, and scores are written out in FP32 (`written_out_s`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.operators.operator_work import (
    OperatorWork,
    alignment,
    visible_pairs,
    widths,
)
from foreplan.datasets.sweeps.operator_table import OperatorTable

Floats = NDArray[np.float64]

#: How often tensors of the scores' size are written or read where they are written out, counted: a
#: product writes them, the mask's sum reads scores and mask and writes, a softmax reads and writes,
#: another product reads.
_SCORE_PASSES = 7
#: Bytes of a score that is written out.
_WRITTEN_BYTES = 4
#: Bytes that move for one of 16-bit operands, which are converted to FP32 first: 2 read, 4 written
#: and 4 read for each 2.
_CONVERTED = 5
#: Queries and keys of a block of the memory-efficient kernel (``kernel_forward.h`` of torch).
_BLOCK = 64


def written_out_s(table: OperatorTable, work: OperatorWork, offer: Mapping[str, Floats]) -> Floats:
    """Seconds of attention whose scores are written out, NaN where they are not (N,).

    Args:
        table: rows of attention (N,).
        work: of the rows.
        offer: figures of the rows' devices by name, ``fp32`` among them (N,) each.
    """
    d, (activation, _) = table.dims, widths(table)
    shared = d["heads"] > d["kv_heads"]
    alone = (d["training"] > 0) | (activation > 2)
    written = (d["masks"] > 0) & ((d["strided"] > 0) | (shared & alone))
    back = np.where(table.kind == "context_attention_gradient", 2.0, 1.0)
    scores = d["b"] * d["heads"] * visible_pairs(d)
    moved = back * _SCORE_PASSES * _WRITTEN_BYTES * scores
    moved = moved + np.where(activation > 2, 1, _CONVERTED) * work.bytes
    seconds = work.flops / offer["fp32"] + moved / work.bandwidth
    return np.asarray(np.where(written, seconds, np.nan))


def score_columns(
    table: OperatorTable, work: OperatorWork, offer: Mapping[str, Floats], structural_s: Floats
) -> dict[str, Floats]:
    """What decides how long scores take that something is added to, by name (N,) each.

    Torch's kernels for them work on blocks whose padding counts where there are few tokens, take a
    number of cycles a score that no product of matrices takes, and where keys are no neighbours in
    memory all scores are written out and read again. NaN where nothing is added, so that experts of
    tables without masks are as without these columns.

    Args:
        table: rows of attention (N,).
        work: of the rows.
        offer: figures of the rows' devices by name, ``clock`` among them (N,) each.
        structural_s: seconds by the structure of the kernels without a mask (N,).
    """
    d, (activation, _) = table.dims, widths(table)
    pairs = visible_pairs(d)
    keys = pairs / d["queries"]
    scores = d["b"] * d["heads"] * pairs
    tiles = np.ceil(d["queries"] / _BLOCK) * np.ceil(keys / _BLOCK)
    padded = d["b"] * d["heads"] * tiles * _BLOCK**2
    masked = d["masks"] > 0
    columns = {
        "log_mask_share": np.log(np.where(masked, d["masks"], np.nan) / (d["b"] * d["heads"])),
        "mask_strided": d["strided"], "mask_learned": d["training"],
        "mask_converts": d["converts"], "mask_broadcast": d["broadcast"],
        "written_out": np.isfinite(written_out_s(table, work, offer)).astype(np.float64),
        "log_seen": np.log(keys),
        "log_padded": np.log(padded / scores),
        "log_score_cycles": np.log(padded / (offer["clock"] * work.units) / structural_s),
        "log_score_bytes": np.log(scores * activation / work.bandwidth / structural_s),
        "log_blocks_per_unit": np.log(
            d["b"] * d["heads"] * np.ceil(d["queries"] / _BLOCK) / work.units
        ),
        "align_seen": alignment(keys),
    }  # fmt: skip
    unknown = {name: np.where(masked, column, np.nan) for name, column in columns.items()}
    return {"masked": masked.astype(np.float64), **unknown}
