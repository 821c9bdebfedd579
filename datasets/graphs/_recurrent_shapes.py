"""`recurrent_shapes`: recurrent layers in a trace, by the shapes of their results alone.

A trace runs them on tensors without data step by step, 5 ms each, to learn what they return; and
keeps them as one operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@contextlib.contextmanager
def recurrent_shapes() -> Iterator[None]:
    """Let torch's own decompositions of recurrent layers return empty tensors for a while."""
    import torch
    import torch._decomp  # registers them
    from torch._C import DispatchKey

    keys = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)
    operators = [getattr(torch.ops.aten, name).input for name in _NAMES]
    before: list[dict[Any, Callable[..., Any]]] = [dict(each.py_kernels) for each in operators]
    try:
        for each in operators:
            each.py_kernels.update(dict.fromkeys(keys, _results))
            each._dispatch_cache.clear()
        yield
    finally:
        for each, kernels in zip(operators, before, strict=True):
            each.py_kernels.update({key: kernels[key] for key in keys})
            each._dispatch_cache.clear()


def _results(
    source: torch.Tensor, hx: Any, params: Any, biases: bool, layers: int, dropout: float,
    train: bool, both: bool, batch_first: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Output and last states, the output laid out step by step."""
    states = list(hx) if isinstance(hx, (tuple, list)) else [hx]
    steps, rows = source.shape[:2] if not batch_first else (source.shape[1], source.shape[0])
    width = states[0].shape[-1] * (2 if both else 1)
    out = source.new_empty(steps, rows, width)
    last = tuple(state.new_empty(state.shape) for state in states)
    return (out.transpose(0, 1) if batch_first else out, *last)
