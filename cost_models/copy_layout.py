"""`copy_layout`: how the elements of a copy lie, by the kernel that copies."""

from __future__ import annotations

from types import MappingProxyType

from foreplan.cost_models.gradient_maps import PADS
from foreplan.datasets.program import TRANSPOSED

#: Kernels that copy parts which lie apart (3), or a transposed tensor (1).
_STRIDED = MappingProxyType(
    dict.fromkeys(
        [f"torch.{name}" for name in ("clone", "contiguous", "cat", "stack", "repeat", "copy_")], 3
    )
    | dict.fromkeys([f"torch.{name}{TRANSPOSED}" for name in ("clone", "contiguous")], 1)
)


def copy_layout(kernel: str, inputs: int) -> int:
    """``strided`` of a map, as `operator_table.KINDS` has it; 0 of what is no copy.

    Args:
        kernel: of a program.
        inputs: that it reads; a pad that adds nothing has one.
    """
    if kernel.removeprefix("torch.") in PADS:
        return 3 if inputs > 1 else 0
    return _STRIDED.get(kernel, 0)
