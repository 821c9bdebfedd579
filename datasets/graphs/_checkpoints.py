"""`checkpointed_layers`: how layers behind ``torch.utils.checkpoint`` are traced.

Activation checkpointing runs its layers' forward passes a second time in the backward pass. A trace
shows them once; that of a training step notes which they are (`recomputations`). Forward passes
alone run each layer once.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from foreplan.datasets.graphs.operator_graph import Recomputation
from foreplan.errors import SpecError

if TYPE_CHECKING:
    import torch

#: Key of what torch keeps of a node's surroundings.
_KEY = "foreplan_recomputed"


@contextlib.contextmanager
def checkpointed_layers(*, training: bool) -> Iterator[None]:
    """Trace layers behind a checkpoint as if there was none; note those of a step.

    Args:
        training: a step is traced.

    Raises:
        SpecError: in the traced code of a step, at layers that say themselves what they keep.
    """
    import torch.utils.checkpoint as checkpoints
    from torch.fx.traceback import annotate, preserve_node_meta

    around: list[Recomputation] = []
    numbers = itertools.count()

    @contextlib.contextmanager
    def noted(early: bool) -> Iterator[None]:
        around.append(Recomputation(next(numbers), early))
        try:
            with annotate({_KEY: tuple(around)}):
                yield
        finally:
            around.pop()

    usual = checkpoints._checkpoint_without_reentrant_generator
    order = inspect.signature(usual)

    def pieced(*given: Any, **named: Any) -> Iterator[None]:
        told = order.bind(*given, **named).arguments
        if told.get("context_fn", checkpoints.noop_context_fn) is not checkpoints.noop_context_fn:
            raise SpecError(
                "capture", got="activation checkpointing with a context_fn",
                expected="a training step whose checkpoints keep their inputs alone",
                fix="leave context_fn out for the prediction, or checkpoint fewer layers",
            )  # fmt: skip
        early = checkpoints._enable_checkpoint_early_stop
        with noted(bool(told.get("early_stop", True) if early is None else early)):
            yield

    def whole(function: Callable[..., Any], _preserve: bool, *inputs: Any) -> Any:
        with noted(False) if training else contextlib.nullcontext():
            return function(*inputs)

    # What ``checkpoint`` calls: its own name lies in the modules that imported it.
    calls: dict[tuple[Any, str], Callable[..., Any]] = {
        (checkpoints.CheckpointFunction, "apply"): whole
    }
    if training:
        calls[checkpoints, usual.__name__] = pieced
    with contextlib.ExitStack() as stack:
        if training:
            stack.enter_context(preserve_node_meta())
        for (owner, name), call in calls.items():
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, call)
        yield


def recomputations(node: torch.fx.Node) -> tuple[Recomputation, ...]:
    """The checkpoints around a call of a trace, outermost first."""
    found: tuple[Recomputation, ...] = node.meta.get("custom", {}).get(_KEY, ())
    return found
