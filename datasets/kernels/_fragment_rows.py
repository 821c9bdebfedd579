"""Weight-only int4 and int8 linears for tens to hundreds of rows, on compute capability 9.0.

The kernel of ``_fragment_rows.cu`` multiplies from the packed form by wgmma, which no other GPUs
have. Compiled on first use by NVRTC. Imports torch. Measured in ``docs/results/kernels.md``.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foreplan.datasets.kernels._cuda_source import cuda_kernel, nothing
from foreplan.datasets.kernels.registry import Packed
from foreplan.datasets.kernels.row_shapes import RowShape, row_shape, takes_blocks

#: What to compile for: the instructions are of this architecture alone.
_ARCHITECTURE = "90a"


def fits(x: Tensor) -> bool:
    """Whether the device of an input multiplies so many rows by this kernel."""
    return x.is_cuda and takes_blocks(x.shape[0], _capability(x.device))


@functools.cache
def _capability(device: torch.device) -> str:
    return "{}.{}".format(*torch.cuda.get_device_capability(device))


def run(x: Tensor, packed: Packed, bias: Tensor | None, bits: int) -> Tensor:
    """Bf16 ``x[rows, K]``, contiguous, times the weight's transpose.

    Raises:
        MissingDataError: as `cuda_kernel`.
    """
    rows, n, k = x.shape[0], packed.n, packed.k
    shape = row_shape(bits, rows, n, k)
    out = torch.empty(rows, n, dtype=torch.bfloat16, device=x.device)
    none, scale = nothing(x.device), packed.tensors["scale"]
    groups = shape.feature_groups * shape.input_groups
    compiled(bits, shape)(
        grid=(-(-rows // shape.rows), -(-n // shape.features), shape.split),
        block=(128 * groups, 1, 1), shared_mem=shape.shared_bytes(bits),
        args=[
            x, packed.tensors["weight"], scale if bits == 4 else none,
            none if bits == 4 else scale, out, none if bias is None else bias, rows, n, k,
        ],
    )  # fmt: skip
    return out


@functools.cache
def compiled(bits: int, shape: RowShape) -> Any:
    """The kernel of a shape, on the current device.

    Raises:
        MissingDataError: as `cuda_kernel`.
    """
    name = f"fragment_rows_{bits}_{'_'.join(map(str, shape))}"
    macros = {
        "BITS": bits, "NB": shape.row_tiles, "MT": shape.feature_tiles,
        "MW": shape.feature_groups, "KW": shape.input_groups, "SPLIT": shape.split, "NAME": name,
    }  # fmt: skip
    kernel = cuda_kernel(
        Path(__file__).with_suffix(".cu"), name, macros, architecture=_ARCHITECTURE
    )
    kernel.set_shared_memory_config(shape.shared_bytes(bits))
    return kernel
