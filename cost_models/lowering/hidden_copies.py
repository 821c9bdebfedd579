"""`hidden_copies`: copies that an operator makes of an operand that does not lie as it wants it.

A layer norm of a transposed tensor copies it first, forward and backward (torch 2.11,
``layer_norm_kernel.cu``: ``expect_contiguous``): where patches of images become rows, that takes
three times what the norm does.
"""

from __future__ import annotations

from collections.abc import Sequence

from foreplan.cost_models.lowering.copy_layout import copy_words, lies_in_rows
from foreplan.cost_models.lowering.graph_backward import flat
from foreplan.cost_models.lowering.graph_step import Step
from foreplan.datasets.dtypes import DTYPE_BYTES
from foreplan.datasets.graphs.operator_call import (
    OperatorCall,
    described_tensors,
    dtype_name,
)
from foreplan.datasets.program import Variant, program

#: Operators that want their first operand row by row. A softmax does, too; none was timed.
_ROW_BY_ROW = frozenset({"layer_norm", "native_layer_norm"})


def hidden_copies(calls: Sequence[OperatorCall]) -> dict[str, Step]:
    """The copy before an operator, forward, by the operator's name.

    Args:
        calls: of a captured graph.
    """
    found: dict[str, Step] = {}
    for call in calls:
        name = call.target.split(".")[1] if "." in call.target else call.target
        if not call.operator or name not in _ROW_BY_ROW:
            continue
        shape, strides, kind = described_tensors(call.arguments)[0]
        dtype = dtype_name(kind)
        if dtype not in DTYPE_BYTES or lies_in_rows(shape, strides):
            continue
        word = copy_words("contiguous", call.arguments)
        rows, cols = flat(shape)
        copied = Variant(dtype, dtype, f"torch.contiguous{word}")
        work = program("elementwise", copied, rows=rows, cols=cols, inputs=1)
        found[call.operator] = Step("copy", call.target, "forward", work, calls=0)
    return found
