"""usable: a torch device that a user named, tried before work begins there."""

from __future__ import annotations

from foreplan.errors import SpecError


def usable(device: str, where: str) -> str:
    """The device's name, once it took a tensor.

    Args:
        device: as torch calls it: ``cpu``, ``cuda``, ``cuda:1``.
        where: the option that names it.

    Raises:
        SpecError: torch knows no such device, or this machine has none.
    """
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        gpus = [f"cuda:{k}" for k in range(torch.cuda.device_count())]
        raise SpecError(
            where, got=device, expected=f"a device of this machine: {', '.join(['cpu', *gpus])}"
        ) from error
    return device
