"""What attention with sinks or with capped scores holds beside a plain one's; see `StageWorkspace`.

The tensors are those of `datasets/kernels/_scored_attention.py`.
"""

from __future__ import annotations

from foreplan.datasets.kernels.registry import SCORED_ROWS
from foreplan.datasets.models.model import Model


def scored_bytes(model: Model, kind: str, width: int, batch: int, queries: int, keys: int) -> int:
    """Most that a call holds beside queries, results and sums; 0 of plain attention.

    A result that is scaled by its sink lies beside one that is not. Where products compute scores,
    a block's queries and results lie there once more, and of each score itself, its copy in fp32,
    its share in fp32 and as it is multiplied by values.

    Args:
        model: the model.
        kind: ``cpu`` or ``cuda``.
        width: bytes of a number that is computed with.
        batch: sequences.
        queries: of each.
        keys: that the last of them sees.
    """
    rows = batch * model.heads
    if model.sinks:
        fused = kind == "cpu" or (width == 2 and not 1 < queries < keys)
        if fused:
            return rows * queries * (width * (model.head_dim + 1) + 8)
    elif model.score_cap is None:
        return 0
    block = min(queries, SCORED_ROWS[kind])
    scores = rows * block * keys * (2 * width + 8)
    masks = 3 * block * keys if queries > 1 else 0
    return scores + masks + 2 * rows * block * width * model.head_dim
