"""`Execution`: how a pass is executed, operators issued one by one or replayed from a CUDA graph.

Issued one by one (``eager``), every operator costs the host time, and the slower of host and device
decides. Recorded as a CUDA graph, a pass is one launch; the device then runs its kernels back to
back, with a gap before each that no price of a kernel alone holds: its code and constants are no
longer near, and the kernel before has to drain. ``compiled`` is a graph, too, of the kernels that
``torch.compile`` makes (``mode="reduce-overhead"``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from foreplan.cost_models.costs import Estimate
from foreplan.cost_models.given_seconds import GapSeconds
from foreplan.datasets.device import Device
from foreplan.datasets.specs import nearest
from foreplan.errors import SpecError

Execution = Literal["eager", "graph", "compiled"]
EXECUTIONS: tuple[Execution, ...] = ("eager", "graph", "compiled")
#: The least compute capability that Triton, in which TorchInductor writes GPUs' kernels, has code
#: for (``torch/utils/_triton.py``).
_TRITON = 7.0
#: Those of operators as torch has them.
UNFUSED: tuple[Execution, ...] = ("eager", "graph")

#: What an operator takes longer behind another one in a CUDA graph than behind itself, where no
#: profile says it (``Profile.switch_s``). Measured on one H200 between programs of decoding
#: (docs/results/h200_history.md); assumed of other GPUs. Passes of ATen calls lose less, 0.10 us of
#: inference and 0.46 of training (`graph_switch`), but small operators are predicted too short.
GRAPH_GAP_S = 0.88e-6
#: Sources whose prices hold it already: what a profile measured has its ``switch_s`` added.
_WITH_GAP = frozenset({"measured", "interpolated"})


def check_execution(execution: str, device: Device, where: str = "--execution") -> None:
    """Refuse a way of execution that is none, or that a device has not.

    Args:
        execution: the way.
        device: what runs.
        where: what the caller calls it, for the error.

    Raises:
        SpecError: it is.
    """
    if execution not in EXECUTIONS:
        guess = nearest(execution, EXECUTIONS)
        raise SpecError(
            where, got=execution, expected=f"one of {', '.join(EXECUTIONS)}",
            fix=f"did you mean {guess}?" if guess else None,
        )  # fmt: skip
    if execution != "eager" and device.kind == "cpu":
        lacks = "CPUs have no CUDA graphs"
        if execution == "compiled":
            lacks = "what is compiled for a CPU is not priced"
        raise SpecError(where, got=f"{execution} on {device.name}", expected=f"a GPU: {lacks}")
    if (
        execution == "compiled"
        and device.kind == "cuda"
        and float(device.compute_capability or _TRITON) < _TRITON
    ):
        raise SpecError(
            where, got=f"compiled on {device.name}",
            expected=f"a GPU of compute capability {_TRITON} or later, for which Triton has code",
        )  # fmt: skip


def check_any_execution(execution: str, devices: Sequence[Device], where: str) -> None:
    """Refuse a way of execution that none of the devices has; see `check_execution`.

    Args:
        execution: the way.
        devices: at least one.
        where: what the caller calls it.

    Raises:
        SpecError: of the first GPU, if there is one.
    """
    gpus = [device for device in devices if device.kind != "cpu"]
    errors: list[SpecError] = []
    for device in [*gpus, *devices[:1]]:
        try:
            return check_execution(execution, device, where)
        except SpecError as error:
            errors.append(error)
    raise errors[0]


def gaps(prices: Sequence[Estimate], gap_s: GapSeconds) -> Sequence[float]:
    """Seconds before each operator of a graph.

    Args:
        prices: of the operators (N,).
        gap_s: before each whose price does not hold it; (N,) seconds count as they are; ``None``
            takes `GRAPH_GAP_S`.
    """
    given = np.asarray(GRAPH_GAP_S if gap_s is None else gap_s, dtype=np.float64)
    if given.ndim:
        return [float(gap) for gap in given]
    return [0.0 if price.source in _WITH_GAP else float(given) for price in prices]
