"""`MAPS`: what autograd computes for operators that work element by element.

Read off ``torch/csrc/autograd`` (derivatives.yaml, torch 2.13) and held against what autograd runs
(``tests/cost_models/lowering/test_autograd_law.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

#: Tensors that each map of an operator's gradient reads: ``grad * (n * x ** (n - 1))`` of a power
#: is a power, a product with a number and a product of two tensors. Masks count as tensors.
MAPS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("pow", "square", "rsqrt", "cos", "tan", "atan", "reciprocal"), (1, 1, 2)),
        **dict.fromkeys(("sqrt", "abs", "log2", "log1p", "expm1", "sin", "sinh", "cosh"), (1, 2)),
        **dict.fromkeys(("exp", "log", "logit", "threshold", "celu", "prelu"), (2,)),
        **dict.fromkeys(("erf", "erfinv"), (1, 1, 1, 1, 2)),
        "asin": (1, 2, 1, 1, 2),
        "acos": (1, 2, 1, 1, 1, 2),
        # By each operand: by its share of the result, by its share of both.
        "hypot": (2, 2),
        "logaddexp": (2, 1, 1, 2),
        "logcumsumexp": (1,) * 19,
        # Masks of both bounds, their conjunction, and the choice.
        "clamp": (1, 1, 2, 2),
        **dict.fromkeys(("clamp_min", "clamp_max"), (1, 2)),
        # Half where both are equal: a half, a mask, a choice, a mask, a fill.
        **dict.fromkeys(("maximum", "minimum"), (1, 2, 2, 2, 2)),
    }
)

#: The same of a number to the power of each element, whose result is used again.
OF_EXPONENTS = (1, 2)

#: The same of losses, whose maps are as large as what they compare.
LOSSES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"), (2,)),
        "kl_div": (2, 1),
        "binary_cross_entropy_with_logits": (1, 2, 1, 1),
    }
)

#: Activations whose gradients are no plain maps, but take functions of every element once more.
FUNCTIONS = frozenset({"gelu", "silu"})

#: What goes on from element to element of a dimension, and goes back the other way.
SCANS = frozenset({"cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"})

#: Operators that go back as they come: the same elements in another order, or the same triangle.
INVOLUTIONS = frozenset(
    {"flip", "tril", "triu", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle",
     "native_channel_shuffle"}
)  # fmt: skip
#: What columns of windows are made into images by, and back.
COLUMNS = MappingProxyType({"im2col": "torch.col2im", "col2im": "torch.im2col"})
#: Operators that write rows into a copy of another tensor; by those rows they are picked again.
WRITES = frozenset(
    {"index_add", "index_copy", "index_put", "scatter", "scatter_add", "scatter_reduce"}
)

#: Copies into the middle of what was filled before (``PadNd.cpp``); by nothing, plain copies.
PADS = frozenset({"pad", "constant_pad_nd"})

#: Operators of several tensors, whose gradients are computed for each by itself.
ARITHMETIC = frozenset(
    {"add", "sub", "rsub", "mul", "div", "where", "maximum", "minimum", "hypot", "logaddexp"}
)

#: Operators whose gradients are views of the gradient that comes back, and those of data alone.
NO_WORK = frozenset(
    {"cat", "stack", "clone", "copy", "contiguous", "reshape", "flatten", "sum", "meshgrid"}
)

#: Operators that pick elements: a gradient of zeros is written, and filled where they were picked.
PICKS = frozenset({"index_select", "gather", "max", "min", "topk", "sort"})

#: Operators whose results hold their operand several times, which is summed up.
REPEATS = frozenset({"repeat", "tile", "repeat_interleave"})

#: The same of views, and views that leave elements out, with the kernel that writes the gradient:
#: parts are joined, or copied into zeros.
EXPANDS = frozenset({"expand", "expand_as", "broadcast_to"})
PARTS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split"), "torch.cat"),
        "unbind": "torch.stack",
        **dict.fromkeys(("slice", "select", "narrow", "diagonal", "unfold"), "torch.copy_"),
    }
)
