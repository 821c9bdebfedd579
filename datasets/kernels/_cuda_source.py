"""`cuda_kernel`: a kernel of this project's own, compiled for the GPU at hand. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from foreplan.errors import MissingDataError


def cuda_kernel(file: Path, name: str, macros: Mapping[str, object]) -> Any:
    """Compile one kernel; callers keep it.

    Args:
        file: its source.
        name: of its function in there, macros expanded.
        macros: what the source expects to be defined.

    Returns:
        A call ``kernel(grid=, block=, args=)`` on torch's current device and stream.

    Raises:
        MissingDataError: a host without NVRTC, which compiles it.
    """
    source = "".join(f"#define {macro} {value}\n" for macro, value in macros.items())
    source += file.read_text(encoding="utf-8")
    try:
        return torch.cuda._compile_kernel(source, name)
    except OSError as error:
        raise MissingDataError(
            f"NVRTC, which compiles {file.name}, cannot be loaded ({error})",
            fix="install torch with its CUDA packages (nvidia-cuda-nvrtc)",
        ) from error
