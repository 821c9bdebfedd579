"""The functions that compute a layer's experts, and where all of them can run at once.

Experts have the kernels of `linear`, as the registry names them. One by one they run anywhere, but
the host asks which rows each has; at once (grouped) it does not, so that a pass can be recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foreplan.datasets.program import Variant

#: Computations and linear kernels that multiply the rows of all experts of a layer at once
#: (`grouped_experts`), and the compute capabilities on which they do: elsewhere `torch._grouped_mm`
#: is a loop that asks the GPU for the rows of each expert, and `torch._scaled_grouped_mm` is not
#: there (torch 2.11, ``aten/src/ATen/native/cuda/GroupedBlas.cpp``).
_GROUPED_ON = {
    ("bf16", "torch.linear"): (9, 10),
    ("bf16", "foreplan.fragment_linear"): (9, 10),
    ("fp8", "torch.scaled_mm"): (9,),
}


def runs_grouped(variant: Variant, compute_capability: float | None = None) -> bool:
    """Whether a GPU computes a layer's experts with a linear kernel without asking the host.

    Only then can a pass with them be recorded.

    Args:
        variant: of the experts' linears.
        compute_capability: of the GPU, as 9.0; ``None`` = of one that can, if any does.
    """
    there = _GROUPED_ON.get((variant.compute, variant.kernel), ())
    return bool(there) and (compute_capability is None or int(compute_capability) in there)


def expert_mlps() -> Callable[..., Any]:
    """The function of the operator ``experts``; imports torch. See `_expert_mlps.expert_mlps`."""
    from foreplan.datasets.kernels._expert_mlps import expert_mlps as found

    return found


def grouped_experts(
    variant: Variant, device: str, hidden: int, ffn: int
) -> Callable[..., Any] | None:
    """`expert_mlps` that does not wait for the host, as a pass that is recorded needs it.

    ``f(x, chosen, share, ups, downs, activate, biases)``, see `_grouped_experts.grouped_experts`.
    Imports torch.

    Args:
        variant: of the experts' linears.
        device: torch device.
        hidden: features around an expert.
        ffn: features inside it.

    Returns:
        ``None`` on processors, where `runs_grouped` is not true, and of features that are no
        multiple of 8, whose rows do not begin at 16 bytes as `torch._grouped_mm` wants them.
    """
    import torch

    if torch.device(device).type != "cuda" or hidden % 8 or ffn % 8:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    if not runs_grouped(variant, major + minor / 10):
        return None
    from foreplan.datasets.kernels._grouped_experts import grouped_experts as found

    return found
