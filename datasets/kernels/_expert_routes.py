"""Rows of a layer sorted by their experts, with biases, and added up again, without the host.

Imports torch. Shape legend: R = rows, A = experts of a row, E = experts, H = features.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foreplan.datasets.kernels._cuda_source import cuda_kernel

#: What one block of a GPU sorts: so many times 1024 choices, and experts; with more its counters
#: would not fit into shared memory. torch's sort and what is made of it are ten launches.
_CHUNKS, _MOST_EXPERTS = 8, 512
_THREADS = 128


class Routes(NamedTuple):
    """Choices in the order of their experts.

    Attributes:
        rows: int64 ``[R A]``: the row of each choice in that order.
        places: int64 ``[R A]``: where the choices of row 0 come in it, then those of row 1, ...
        ends: int32 ``[E]``: one past the last choice of each expert.
    """

    rows: Tensor
    places: Tensor
    ends: Tensor


def by_expert(chosen: Tensor, count: int) -> Routes:
    """Sort the choices ``[R, A]`` int64 of ``count`` experts; the order within one is kept."""
    total, active = chosen.numel(), chosen.shape[1]
    new = functools.partial(torch.empty, device=chosen.device)
    if chosen.is_cuda and total <= 1024 * _CHUNKS and count <= _MOST_EXPERTS:
        made = Routes(
            new(total, dtype=torch.int64), new(total, dtype=torch.int64),
            new(count, dtype=torch.int32),
        )  # fmt: skip
        _compiled("sort_by_expert")(
            grid=(1, 1, 1), block=(1024, 1, 1),
            args=[chosen.contiguous(), *made, total, active, count],
        )  # fmt: skip
        return made
    experts, order = chosen.reshape(-1).sort(stable=True)
    ends = torch.searchsorted(
        experts, torch.arange(count, device=chosen.device), right=True, out_int32=True
    )
    places = new(total, dtype=torch.int64)
    places.scatter_(0, order, torch.arange(total, device=chosen.device))
    return Routes(order // active, places, ends)


def added_up(made: Tensor, places: Tensor, share: Tensor) -> Tensor:
    """``out[r] = sum_a share[r, a] * made[places[r, a]]``, added up in fp32.

    The order is that of a row's choices, so that the sum is the same in every run.

    Args:
        made: bf16 ``[R A, H]``.
        places: of `Routes`.
        share: fp32 ``[R, A]``.

    Returns:
        bf16 ``[R, H]``.
    """
    rows, active = share.shape
    features = made.shape[1]
    if made.is_cuda and features % 8 == 0:
        out = made.new_empty(rows, features)
        blocks = -(-features // (8 * _THREADS))
        _compiled("add_up")(
            grid=(rows, blocks, 1), block=(_THREADS, 1, 1),
            args=[made, places, share.contiguous(), out, active, features // 8],
        )  # fmt: skip
        return out
    weighted = made.index_select(0, places).view(rows, active, features) * share.unsqueeze(2)
    return weighted.sum(1).to(made.dtype)


def biased(made: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
    """Add ``bias[E, N]`` of each row's expert to bf16 ``made[R A, N]``, in place."""
    rows, features = made.shape
    if made.is_cuda and features % 8 == 0:
        blocks = -(-features // (8 * _THREADS))
        _compiled("add_bias")(
            grid=(rows, blocks, 1), block=(_THREADS, 1, 1),
            args=[made, bias, ends, len(ends), features // 8],
        )  # fmt: skip
        return made
    every = torch.arange(rows, device=made.device, dtype=ends.dtype)
    return made.add_(bias.index_select(0, torch.searchsorted(ends, every, right=True)))


@functools.cache
def _compiled(name: str) -> Any:
    macros = {"CHUNKS": _CHUNKS, "MOST_EXPERTS": _MOST_EXPERTS}
    return cuda_kernel(Path(__file__).with_suffix(".cu"), name, macros)
