"""`reduced_steps`: gradients of rows that were scattered into the largest or mean of each place.

By autograd's formulas (``scatter_reduce_backward`` of ``FunctionsManual.cpp``, torch 2.13). What
was there before has its share computed whether anybody asks for it or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from foreplan.cost_models.lowering.argument_words import (
    ALONE,
    LARGEST,
    MEANS,
    PLACES,
    PRODUCTS,
    WHOLE_ROWS,
)
from foreplan.cost_models.lowering.backward_steps import fill_step, wide_step
from foreplan.cost_models.lowering.graph_gradients import Operand
from foreplan.cost_models.lowering.graph_step import Step
from foreplan.datasets.program import Program

#: A product with a mask, and zeros that are written place by place.
MASKED, CLEARED = "torch.mul_by_mask", "torch.scatter_value"


def reduced_steps(back: Step, read: Sequence[Operand]) -> list[Step]:
    """The steps; none of sums without what was there, nor of products, which go as they came.

    Args:
        back: the forward pass as a step of the backward one; its kernel says how it reduced.
        read: what was there, the index, and what was scattered.
    """
    assert isinstance(back.work, Program)
    kernel, layout = back.work.variant.kernel, ""
    for word in (WHOLE_ROWS, PLACES):
        if kernel.endswith(word):
            kernel, layout = kernel.removesuffix(word), word
    alone = kernel.endswith(ALONE)
    kernel = kernel.removesuffix(ALONE)
    if kernel.endswith(PRODUCTS):
        return []
    whole, rows, wanted = read[0].shape, read[-1].shape, read[-1].gradient
    picked = wide_step(back, rows, 1, kernel=f"torch.gather{layout}")
    times = max(1, round(math.prod(rows) / max(1, math.prod(whole))))
    added = wide_step(back, whole, 1 + times, kernel=f"torch.scatter_add{layout}")
    if kernel.endswith(MEANS):
        counted = [
            wide_step(back, whole, 1, kernel="torch.eq"),
            wide_step(back, whole, 1, kernel="torch.masked_fill"),
            wide_step(back, whole, 2),
        ]
        steps = [fill_step(back, whole), fill_step(back, rows), added, *counted]
        steps += [picked, picked, wide_step(back, rows, 2)] if wanted else []
    elif kernel.endswith(LARGEST):
        marked = [
            step
            for shape in (whole, rows)
            for step in (
                wide_step(back, shape, 2, kernel="torch.eq"),
                wide_step(back, shape, 1, kernel="torch.to"),
            )
        ]
        shared = [
            step
            for shape in ((whole, rows) if wanted else (whole,))
            for step in (
                wide_step(back, shape, 2, kernel="torch.eq"),
                wide_step(back, shape, 2, kernel=MASKED),
            )
        ]
        steps = [picked, *marked, added, wide_step(back, whole, 2), *shared]
        steps += [picked] if wanted else []
    else:
        steps = [picked] if wanted else []
    if alone:
        steps.append(wide_step(back, whole, 1 + times, kernel=CLEARED))
    return steps
