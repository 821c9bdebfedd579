"""The routed experts of a layer on the rows that chose them, shared by profile and runtime.

Imports torch. Shape legend: R = rows, A = experts of a row, E = experts, I = features inside one,
H = features of the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from foreplan.datasets.experts import MOST_PADDING, padded_rows

Weight = TypeVar("Weight")


def expert_mlps(
    x: Tensor,
    chosen: Tensor,
    share: Tensor,
    ups: Sequence[Weight],
    downs: Sequence[Weight],
    run: Callable[[Tensor, Weight, Tensor | None], Tensor],
    activate: Callable[[Tensor, Tensor], Tensor],
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """``out[r] = sum_a share[r, a] * down_e(activate(gate_e(x[r]), up_e(x[r])))``.

    ``e`` is ``chosen[r, a]``. Expert after expert takes all of its rows at once; one without rows
    costs nothing. How many rows an expert has is only known on the host, so that a call waits for
    the router of a GPU and cannot be recorded as a CUDA graph. An expert computes `padded_rows`.

    Args:
        x: ``[R, H]``.
        chosen: ``[R, A]`` int64, different experts in each row.
        share: ``[R, A]`` fp32.
        ups: of each expert gate and up fused, ``[2 I, H]``, as ``run`` takes it.
        downs: of each expert ``[H, I]``.
        run: a linear kernel.
        activate: of gate and up, ``[rows, I]`` each.
        biases: of all experts' gate and up ``[E, 2 I]``, and ``[E, H]``; ``None`` where without.

    Returns:
        ``[R, H]`` in the dtype of ``x``, added up in fp32.
    """
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True)
    rows = order.div(chosen.shape[1], rounding_mode="floor")
    padded = F.pad(rows, (0, len(flat) // 8 + MOST_PADDING))
    weight = share.reshape(-1)[order].unsqueeze(1)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    begin = 0
    for expert, count in enumerate(torch.bincount(flat, minlength=len(ups)).tolist()):
        if count == 0:
            continue
        # Rows of the next expert fill up, and are left out again.
        taken = x.index_select(0, padded.narrow(0, begin, padded_rows(count)))
        of_up, of_down = (None if bias is None else bias[expert] for bias in biases)
        gate, up = run(taken, ups[expert], of_up).chunk(2, 1)
        made = run(activate(gate, up), downs[expert], of_down).narrow(0, 0, count)
        mine = rows.narrow(0, begin, count)
        out.index_add_(0, mine, made * weight.narrow(0, begin, count))
        begin += count
    return out.to(x.dtype)
