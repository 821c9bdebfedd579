"""`expert_bytes`: the most that a GPU holds while the routed experts of a layer run.

They run one after another, or all at once where the GPU has kernels for it (`runs_grouped` of
`foreplan.datasets.kernels.expert_kernels`). A plan is not told which: it takes the larger.
"""

from __future__ import annotations

from collections.abc import Sequence

from foreplan.datasets.experts import Experts
from foreplan.datasets.kernels.expert_kernels import runs_grouped
from foreplan.datasets.kernels.registry import FEW_ROWS, quantises_activations
from foreplan.datasets.models.model import Model
from foreplan.datasets.program import Variant

_FUSED = "foreplan.fragment_linear"


def expert_bytes(
    model: Model, experts: Experts, rows: int, unpacked: int, variants: Sequence[Variant]
) -> int:
    """Bytes beside the residual stream, the layer's norm among them.

    Args:
        model: has the experts.
        experts: of its layers.
        rows: of the pass.
        unpacked: the most that a product of one expert holds beside its input and output.
        variants: kernels that may multiply.
    """
    normed = 2 * rows * model.hidden
    in_turn = _in_turn(model, experts, rows) + unpacked
    if not any(runs_grouped(variant) for variant in variants):
        return normed + in_turn
    fused = any(v.kernel == _FUSED for v in variants)
    rounded = any(quantises_activations(v) for v in variants)
    at_once = _all_at_once(model, experts, rows, fused=fused, rounded=rounded)
    return normed + max(in_turn, at_once)


def routing_bytes(experts: Experts) -> int:
    """Of a row: 32 for each choice of an expert, to be sorted, and 6 for each expert's score."""
    return 32 * experts.active + 6 * experts.count


def _in_turn(model: Model, experts: Experts, rows: int) -> int:
    """One expert may get every row, and the one before it too.

    An expert's rows are gathered, go through up, activation, product and down, and are added up,
    weighted, in fp32; its rows, up and output are kept until the next one has its own.
    """
    each = 2 * (6 * model.hidden + 4 * experts.ffn)
    if experts.active > 1:
        each += 2 * (2 * model.hidden + 2 * experts.ffn)
    return rows * (routing_bytes(experts) + each)


def _all_at_once(model: Model, experts: Experts, rows: int, *, fused: bool, rounded: bool) -> int:
    """A row is gathered for every expert that it chose, and lies so until it is added up.

    A choice with its share takes 28 bytes. Fused kernels for many rows unpack one linear of all
    experts. Inputs that are rounded to 8 bits lie beside the product, with a scale each.
    """
    drawn = rows * experts.active
    wide, inner = 2 * drawn * model.hidden, 2 * drawn * experts.ffn
    up, down = (2 * shape.n * shape.k * experts.count for shape in model.expert_linears)
    if not fused or drawn <= FEW_ROWS * experts.count:
        up = down = 0
    if rounded:
        up, down = up + drawn * (model.hidden + 4), down + drawn * (experts.ffn + 4)
    return 28 * drawn + max(
        wide + 2 * inner + up,
        4 * inner,  # gate, up, the gate's activation and their product
        inner + wide + down,
        wide + 2 * rows * model.hidden,
    )
