"""`Step`: one operator of a pass as a captured graph is lowered to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from foreplan.cost_models.costs import Work
from foreplan.cost_models.lowering.host_call import HostCall

Phase = Literal["inference", "training"]
Part = Literal["forward", "loss", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = ("inference", "training")
PARTS: tuple[Part, ...] = ("forward", "loss", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class Step:
    """One operator of a pass.

    Attributes:
        kind: as `OperatorNode.op`, or ``optimizer``.
        target: the operator's own name (``aten.linear``).
        part: forward, loss, backward or optimizer.
        work: what it costs.
        calls: ATen calls that the host makes for it.
        host: of a forward step, the call as the host issues it, gradients included.
        evaluated: of a training step, path of the part around it that was captured in evaluation
            mode, because it could not be in training mode; see `OperatorGraph.evaluated`.
        in_place: of a forward step, its result is an operand's memory.
    """

    kind: str
    target: str
    part: Part
    work: Work
    calls: int = 1
    host: HostCall | None = None
    evaluated: str | None = None
    in_place: bool = False
