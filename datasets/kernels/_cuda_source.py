"""`cuda_kernel`: a kernel of this project's own, compiled for the GPU at hand. Imports torch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foreplan.errors import MissingDataError


def cuda_kernel(
    file: Path, name: str, macros: Mapping[str, object], *, architecture: str | None = None
) -> Any:
    """Compile one kernel; callers keep it.

    Args:
        file: its source.
        name: of its function in there, macros expanded.
        macros: what the source expects to be defined.
        architecture: to compile for, as ``90a``; the GPU's if left out.

    Returns:
        A call ``kernel(grid=, block=, args=)`` on torch's current device and stream.

    Raises:
        MissingDataError: a host without NVRTC, which compiles it.
    """
    source = "".join(f"#define {macro} {value}\n" for macro, value in macros.items())
    source += file.read_text(encoding="utf-8")
    try:
        return torch.cuda._compile_kernel(source, name, compute_capability=architecture)
    except OSError as error:
        raise MissingDataError(
            f"NVRTC, which compiles {file.name}, cannot be loaded ({error})",
            fix="install torch with its CUDA packages (nvidia-cuda-nvrtc)",
        ) from error


@functools.cache
def nothing(device: torch.device) -> Tensor:
    """A tensor whose address is null: an argument that is not there."""
    return torch.empty(0, dtype=torch.bfloat16, device=device)
