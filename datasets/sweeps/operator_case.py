"""`Case`: one library operator of the sweep inside CUDA graphs, and the `Operands` it runs on.

What cases share: how large they may be, sizes of products and of maps, how a gradient is called.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

#: Calls of one operator on its operands in turn.
Calls = list[Callable[[], Any]]

#: Largest FLOP and bytes of one operator in FP32: about 20 ms on an H200.
MOST_FLOPS, MOST_BYTES = 8e11, 8e9
#: Before the name of an operator: of many rows, each short, as pixels or tokens of few channels.
NARROW = "narrow_"
#: FLOP of 16-bit products over those of FP32. Assumed.
_HALF_FLOPS = 8.0


class Case(NamedTuple):
    """One operator to time.

    Attributes:
        op: its name.
        kind: of `operator_table.KINDS`.
        dtype: as an operator table has it.
        dims: sizes by name.
        calls: makes the calls from views of a buffer.
    """

    op: str
    kind: str
    dtype: str
    dims: dict[str, int]
    calls: Callable[[Operands], Calls]


class Operands:
    """Views of random buffers, one a data type, because zeros run faster than data.

    Products have a buffer of their own with normal values, as weights and activations have: of
    values between 0.5 and 1.5, which all other operators get, an H200's large products take up to
    8 % less, because fewer bits change and its clock stays higher (docs/results/end_to_end.md).

    Args:
        device: torch device.
        most_bytes: of all operands of one case.
    """

    def __init__(self, device: str, most_bytes: float = 2 * MOST_BYTES) -> None:
        self.device = device
        self._bytes = int(most_bytes)
        self._buffers: dict[tuple[str, bool], Any] = {}

    def __call__(self, dtype: str, offset: int, *shape: int, normal: bool = False) -> Any:
        """A tensor of a shape that begins behind so many elements.

        Args:
            dtype: in the words of the tables.
            offset: elements of the buffer before it.
            shape: of it.
            normal: values of a normal distribution, for products.
        """
        import torch

        if (dtype, normal) not in self._buffers:
            if self._short_of_memory():
                self._buffers.clear()
                torch.cuda.empty_cache()
            name, width = ("float32", 4) if dtype == "fp32" else (dtype, 2)
            kind = getattr(torch, name)
            made = torch.empty(self._bytes // width, dtype=kind, device=self.device)
            made = made.normal_() if normal else made.uniform_(0.5, 1.5)
            self._buffers[dtype, normal] = made
        start = -(-offset // 256) * 256  # allocators align tensors, and kernels count on it
        return self._buffers[dtype, normal][start : start + int(np.prod(shape))].view(*shape)

    def _short_of_memory(self) -> bool:
        """Whether one more buffer leaves a case less than twice its room for what it writes.

        Six buffers of 16 GB are more than an H100 has.
        """
        import torch

        if not self.device.startswith("cuda"):
            return False
        return bool(torch.cuda.mem_get_info(self.device)[0] < 3 * self._bytes)


def product_shape(
    rng: np.random.Generator, *, batched: bool, width: int, flops: float = MOST_FLOPS,
    most_bytes: float = MOST_BYTES,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Batch, rows, columns and contracted size of a product of ``width`` bytes an element."""
    while True:
        if batched:
            top = rng.choice([10.0, 12.0, 14.0], p=[0.6, 0.25, 0.15])
            sizes = 2.0 ** rng.uniform([0, 3, 3, 3], [10, top, top, top])
        else:
            sizes = 2.0 ** rng.uniform([0, 2, 4, 4], [0, 13, 16, 16])
        shape = np.maximum(np.round(sizes), 1).astype(int)
        # Models have round sizes, but one may be odd (tokens, classes) where the others are round.
        unit = rng.choice([64, 8, 1], 3, p=[0.6, 0.15, 0.25])
        shape[1:] = np.maximum(shape[1:] // unit, 1) * unit
        b, m, n, k = (int(size) for size in shape)
        small = width * b * (m * k + k * n + m * n) < most_bytes
        if small and 2.0 * b * m * n * k < flops:
            return b, m, n, k


def wide_shape(rng: np.random.Generator, most_bytes: float = MOST_BYTES) -> tuple[int, int]:
    """Rows and columns of an operator over single elements."""
    while True:
        rows, cols = (int(2.0 ** rng.uniform(low, high)) for low, high in ((1, 17), (4, 15)))
        if rng.random() < 0.5 and cols > 64:
            cols = cols // 64 * 64
        if 12.0 * rows * cols < most_bytes / 2:
            return rows, cols


def narrow_shape(rng: np.random.Generator, most_bytes: float = MOST_BYTES) -> tuple[int, int]:
    """Rows and columns of an operator over many rows of few columns."""
    while True:
        rows, cols = (int(2.0 ** rng.uniform(low, high)) for low, high in ((5, 21), (3.5, 10)))
        if rng.random() < 0.85:
            cols = max(8, cols // 8 * 8)
        if 12.0 * rows * cols < most_bytes / 2:
            return rows, cols


def narrow_product(
    rng: np.random.Generator, *, width: int, flops: float, most_bytes: float
) -> tuple[int, int, int]:
    """Rows, columns and contracted size of a product of very many rows, of few columns."""
    while True:
        sizes = 2.0 ** rng.uniform([6, 4, 4], [20, 9, 12])
        # Rows are odd as often as not, channels seldom.
        units = [rng.choice([64, 8, 1]), *rng.choice([32, 8, 1], 2, p=[0.5, 0.35, 0.15])]
        m, few, more = (max(1, int(size) // int(unit)) * int(unit)
                        for size, unit in zip(sizes, units, strict=True))  # fmt: skip
        n, k = (few, more) if rng.random() < 0.5 else (more, few)
        if width * (m * k + k * n + m * n) < most_bytes and 2.0 * m * n * k < flops:
            return m, n, k


def images_of(
    view: Operands, dtype: str, batch: int, channels: int, side: int, *, last: bool
) -> Any:
    """Square images at the beginning of a buffer, their channels last in memory or not."""
    if last:
        return view(dtype, 0, batch, side, side, channels).permute(0, 3, 1, 2)
    return view(dtype, 0, batch, channels, side, side)


def width_of(dtype: str) -> int:
    """Bytes of an element."""
    return 4 if dtype == "fp32" else 2


def most_flops(dtype: str, scale: float) -> float:
    """FLOP of the largest operator of a data type."""
    return MOST_FLOPS * scale * (1.0 if dtype == "fp32" else _HALF_FLOPS)


def gradient_call(forward: Callable[..., Any], operands: list[Any]) -> Callable[[], Any]:
    """The call that computes gradients by operands, as autograd does, its forward pass behind it.

    Args:
        forward: of the operands, one tensor.
        operands: floating-point tensors.
    """
    import torch

    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in operands]
        out = forward(*leaves)
    # As an operator behind would hand it: dense, in the layout of the result.
    given = out.detach()
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    return partial(torch.autograd.grad, out, asked, given, retain_graph=True)
