"""`looped_steps`: which steps of a pass belong to loops of small calls.

A recurrence that is written in Python goes round the same few calls on operands of some KiB, no
module and no weight between them: RWKV's and Mamba's tokens, a delta rule's rows, an integrator's
steps. Its code and its data never leave the nearest caches, and a line of Python lies between its
calls, where a network's go through modules. They take less than half of what calls of networks do.

Layers of a network repeat as well; what tells them apart is their weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.lowering.graph_step import Step
from foreplan.datasets.program import Program

#: Calls of a turn at most; assumed, as a backward turn of RWKV's has more than 64.
_LONGEST = 128
#: Turns, and calls of all of them, from which on they are a loop; assumed, as rotations and sums of
#: gradients repeat four times or so.
_TURNS, _CALLS = 8, 32
#: Kinds of operators with a weight, which come in modules.
_OF_MODULES = frozenset(
    {"linear", "bilinear", "convolution", "norm", "embedding", "attention", "recurrent"}
)


def looped_steps(steps: Sequence[Step], near_bytes: float) -> NDArray[np.bool_]:
    """Which steps go round and round (N,).

    Args:
        steps: of a pass, from `graph_programs` (N,).
        near_bytes: what the operands of a turn may take together.
    """
    count = len(steps)
    found = np.zeros(count, dtype=np.bool_)
    names = {
        name: index for index, name in enumerate(dict.fromkeys((s.part, s.target) for s in steps))
    }
    # A step with a weight equals no other.
    keys = np.array(
        [
            -1 - index if step.kind in _OF_MODULES else names[step.part, step.target]
            for index, step in enumerate(steps)
        ]
    )
    moved = np.array([step.work.bytes if isinstance(step.work, Program) else 0.0 for step in steps])
    sums = np.concatenate([[0.0], np.cumsum(moved)])
    for turn in range(1, min(_LONGEST, count // _TURNS) + 1):
        again = keys[turn:] == keys[:-turn]
        # Where a stretch of repeated keys begins and ends.
        edges = np.flatnonzero(np.diff(np.concatenate([[False], again, [False]])))
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            whole = int(end) + turn - int(begin)
            each = (sums[end + turn] - sums[begin]) * turn / whole
            if whole >= max(_TURNS * turn, _CALLS) and each <= near_bytes:
                found[begin : end + turn] = True
    return found
