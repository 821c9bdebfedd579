"""`checkpointed_layers`: how layers behind ``torch.utils.checkpoint`` are traced.

Activation checkpointing runs its layers' forward passes a second time in the backward pass. A trace
shows them once, and a training step was priced as without: a third too short where all layers are.
So a trace of a step refuses them. Forward passes alone run each layer once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from foreplan.errors import SpecError


@contextlib.contextmanager
def checkpointed_layers(*, training: bool) -> Iterator[None]:
    """Trace layers behind a checkpoint as if there was none, or refuse them.

    Args:
        training: a step is traced.

    Raises:
        SpecError: in the traced code of a step, at the first layer that would be computed again.
    """
    import torch.utils.checkpoint as checkpoints

    # What ``checkpoint`` calls: its own name lies in the modules that imported it.
    reentrant: tuple[Any, str] = (checkpoints.CheckpointFunction, "apply")
    calls: dict[tuple[Any, str], Callable[..., Any]] = {reentrant: _once}
    if training:
        calls = dict.fromkeys(
            (reentrant, (checkpoints, "_checkpoint_without_reentrant_generator")), _refuse
        )
    with contextlib.ExitStack() as stack:
        for (owner, name), call in calls.items():
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, call)
        yield


def _once(function: Callable[..., Any], _preserve: bool, *inputs: Any) -> Any:
    return function(*inputs)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise SpecError(
        "capture", got="activation checkpointing",
        expected="a training step whose layers are computed once, as what is recomputed is not "
        "priced",
        fix="turn it off for the prediction; such layers take their forward pass longer",
    )  # fmt: skip
