"""`loss_steps`: the loss of a training step whose pass ends in something like logits."""

from __future__ import annotations

from collections.abc import Sequence

from foreplan.cost_models.lowering.backward_steps import LOG_SOFTMAX_BACKWARD
from foreplan.cost_models.lowering.graph_step import Step
from foreplan.datasets.program import Program, Variant, program

#: What networks do to logits: a bias of each word (BART), a scale, a cap (``c * tanh(x / c)``).
_OF_LOGITS = frozenset({"add", "sub", "mul", "div", "tanh"})


def loss_steps(forward: Sequence[Step]) -> list[Step]:
    """A cross-entropy and its gradient; nothing of a pass that ends in anything but logits.

    Args:
        forward: of the pass, in order. It ends in logits where it ends in a linear layer, or in
            maps behind one that read no other tensor as large.
    """
    works = (step.work for step in reversed(forward))
    last = next((work for work in works if not _changes_logits(work)), None)
    if not isinstance(last, Program) or last.op != "linear":
        return []
    d, dtype = last.dims, last.variant.compute
    logits = Variant(dtype, dtype, "torch.cross_entropy")
    size = {"rows": d["rows"], "cols": d["n"]}
    # Of the likelihoods that were picked, by zeros that are filled; then of the softmax.
    softmax = Variant(dtype, dtype, LOG_SOFTMAX_BACKWARD)
    back = program("fill", logits, **size), program("elementwise", softmax, **size, inputs=2)
    return [
        Step("softmax", "cross_entropy", "loss", program("softmax", logits, **size)),
        *(Step("softmax", "cross_entropy", "backward", work) for work in back),
    ]


def _changes_logits(work: object) -> bool:
    if not isinstance(work, Program) or work.op != "elementwise" or work.dims["inputs"] > 1:
        return False
    return work.variant.kernel.removeprefix("torch.").partition("_by_")[0] in _OF_LOGITS
