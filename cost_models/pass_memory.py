"""`devices_that_fit`: which devices have the memory of a pass, as far as that is known."""

from __future__ import annotations

from collections.abc import Sequence

from foreplan.cost_models.lowering.asked_steps import Priced
from foreplan.cost_models.lowering.graph_step import Phase, Step
from foreplan.cost_models.memory import show_bytes
from foreplan.datasets.device import Device
from foreplan.datasets.dtypes import DTYPE_BYTES, weight_bytes
from foreplan.datasets.graphs.given_module import GivenModule
from foreplan.datasets.program import Program
from foreplan.errors import InfeasibleError

#: Bytes of weights, gradients and two moments over those of the weights.
_TRAINING_STATE = 4
#: Operators that read tensors as they lie in memory, and write into another one.
_WHOLE = frozenset({"linear", "conv", "batch_norm", "norm", "softmax"})


def devices_that_fit(
    model: Priced, phase: Phase, steps: Sequence[Step], targets: Sequence[Device], shape: str
) -> dict[str, bool | None]:
    """Whether each device has the memory, by name; ``None`` where its memory is not known.

    Counted are the state and what one operator reads and writes, of those in `_WHOLE` the one that
    moves most: it holds both at once. No other activations are.

    Args:
        model: whose pass.
        phase: of the pass.
        steps: of the pass.
        targets: the devices, at least one.
        shape: the pass's, in words.

    Raises:
        InfeasibleError: none has it.
    """
    state, moved = state_bytes(model, phase), _activation_bytes(steps)
    need = state + moved
    fits = {t.name: None if t.memory_bytes is None else need <= t.memory_bytes for t in targets}
    if set(fits.values()) == {False}:
        largest = max(targets, key=lambda target: target.memory_bytes or 0)
        kept = "weights, gradients and moments" if phase == "training" else "weights"
        raise InfeasibleError(
            f"{model.name}, {shape}, needs at least {show_bytes(need)} ({kept} "
            f"{show_bytes(state)}, one operator's input and output {show_bytes(moved)}), "
            f"{largest.name} has {show_bytes(largest.memory_bytes or 0)}",
            fix="ask for a smaller batch or model or another device; 'foreplan plan' splits a "
            "model over several",
        )
    return fits


def state_bytes(model: Priced, phase: Phase) -> int:
    """Bytes of the weights, when training of gradients and moments, too."""
    if isinstance(model, GivenModule):
        weights = model.weight_bytes
    else:
        weights = int(model.parameters * DTYPE_BYTES[model.dtype])
    return weights * (_TRAINING_STATE if phase == "training" else 1)


def _activation_bytes(steps: Sequence[Step]) -> int:
    """Most bytes that one operator of the forward pass reads and writes beside its weights."""
    most = 0.0
    for step in steps:
        work = step.work
        if step.part != "forward" or not isinstance(work, Program) or work.op not in _WHOLE:
            continue
        weights = 0
        if work.op == "linear":
            weights = weight_bytes(work.dims["n"], work.dims["k"], work.variant.storage)
        most = max(most, work.bytes - weights)
    return int(most)
