"""The routed experts of a layer on a GPU, all at once and without waiting for the host.

Rows are sorted by expert on the GPU, and one kernel multiplies each expert's rows by its weight
(`grouped_linear`), so that a pass can be recorded as a CUDA graph. Where there is no such kernel
the host calls expert after expert, see `_expert_mlps`. Imports torch. Shape legend: R = rows, A =
experts of a row, E = experts, I = features inside one, H = features of the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from foreplan.datasets.kernels import _fragment_linear
from foreplan.datasets.kernels.registry import Packed
from foreplan.datasets.program import Variant

#: ``f(x[rows, K], weights[E N, K], ends[E] int32) -> [rows, N]``; see
#: `_fragment_linear.run_grouped`.
GroupedLinear = Callable[[Tensor, Packed, Tensor], Tensor]
#: Compute capabilities whose `torch._grouped_mm` is one kernel. On others it is a loop that asks
#: the GPU for the rows of each expert (torch 2.11, ``aten/src/ATen/native/cuda/GroupedBlas.cpp``).
_CAPABILITIES = (9, 10)


def _grouped_mm(x: Tensor, packed: Packed, ends: Tensor) -> Tensor:
    weights = packed.tensors["weight"].view(ends.shape[0], -1, packed.k)
    return torch._grouped_mm(x, weights.transpose(1, 2), offs=ends)


_KERNELS: Mapping[Variant, GroupedLinear] = MappingProxyType(
    {
        Variant.parse("bf16/bf16/torch.linear"): _grouped_mm,
        Variant.parse("int8/bf16/foreplan.fragment_linear"): _fragment_linear.run_grouped,
        Variant.parse("int4/bf16/foreplan.fragment_linear"): _fragment_linear.run_grouped,
    }
)


def grouped_linear(variant: Variant, device: torch.device) -> GroupedLinear | None:
    """The kernel of a linear variant for the rows of all experts; ``None`` if there is none."""
    if device.type != "cuda" or not hasattr(torch, "_grouped_mm"):
        return None
    major, _ = torch.cuda.get_device_capability(device)
    return _KERNELS.get(variant) if major in _CAPABILITIES else None


def grouped_experts(
    run: GroupedLinear,
    x: Tensor,
    chosen: Tensor,
    share: Tensor,
    ups: Packed,
    downs: Packed,
    activate: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """What `_expert_mlps.expert_mlps` computes; no length depends on how rows fall.

    Args:
        run: from `grouped_linear`.
        x: ``[R, H]``.
        chosen: ``[R, A]`` int64, different experts in each row.
        share: ``[R, A]`` fp32.
        ups: of all experts gate and up fused, ``[E 2 I, H]``.
        downs: of all experts, ``[E H, I]``.
        activate: of gate and up, ``[R A, I]`` each.

    Returns:
        ``[R, H]`` in the dtype of ``x``, added up in fp32.
    """
    count, (rows, active) = downs.n // x.shape[1], chosen.shape
    experts, order = chosen.view(-1).sort(stable=True)
    every = torch.arange(count, device=x.device)
    ends = torch.searchsorted(experts, every, right=True, out_int32=True)
    wide = run(x.index_select(0, order // active), ups, ends)
    made = activate(*wide.chunk(2, 1))
    del wide
    made = run(made, downs, ends)
    # Back to the order of rows: added up as they lie, a sum would depend on who comes first.
    places = torch.empty_like(order)
    places.scatter_(0, order, torch.arange(len(order), device=x.device))
    made = made.index_select(0, places)
    weighted = made.view(rows, active, -1) * share.unsqueeze(2)
    del made
    return weighted.sum(1).to(x.dtype)
