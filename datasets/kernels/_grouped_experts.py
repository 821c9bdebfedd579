"""The routed experts of a layer on a GPU, all at once and without waiting for the host.

Rows are sorted by expert on the GPU, and one kernel multiplies each expert's rows by its weight
(`_grouped_linear`), so that a pass can be recorded as a CUDA graph. Where there is no such kernel
the host calls expert after expert, see `_expert_mlps`. Imports torch. Shape legend: R = rows, A =
experts of a row, E = experts, I = features inside one, H = features of the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from foreplan.datasets.kernels import _grouped_linear
from foreplan.datasets.kernels._expert_routes import added_up, by_expert
from foreplan.datasets.kernels.registry import Packed


def grouped_experts(
    x: Tensor,
    chosen: Tensor,
    share: Tensor,
    ups: Packed,
    downs: Packed,
    activate: Callable[[Tensor, Tensor], Tensor],
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """What `_expert_mlps.expert_mlps` computes; no length depends on how rows fall.

    Args:
        x: ``[R, H]``.
        chosen: ``[R, A]`` int64, different experts in each row.
        share: ``[R, A]`` fp32.
        ups: of all experts gate and up fused, ``[E 2 I, H]``.
        downs: of all experts, ``[E H, I]``.
        activate: of gate and up, ``[R A, I]`` each.
        biases: of all experts' gate and up ``[E, 2 I]``, and ``[E, H]``; ``None`` where without.

    Returns:
        ``[R, H]`` in the dtype of ``x``, added up in fp32.
    """
    of_up, of_down = biases
    routes = by_expert(chosen, downs.n // x.shape[1])
    wide = _grouped_linear.run(x.index_select(0, routes.rows), ups, routes.ends, of_up)
    made = activate(*wide.chunk(2, 1))
    del wide
    made = _grouped_linear.run(made, downs, routes.ends, of_down)
    return added_up(made, routes.places, share)
