"""`training_operators`: rows of an operator's passes in training, and of what only training has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from foreplan.datasets.dtypes import DTYPE_BYTES
from foreplan.datasets.operator_row import Operator

if TYPE_CHECKING:
    from foreplan.datasets.program import Variant

#: Passes of an operator in training, as they end its name.
PASSES = ("forward", "backward", "weight_gradient")

_ROWS = ("rows", "cols")
_CONVOLUTION = (
    "batch", "channels", "height", "width", "filters", "kernel_height", "kernel_width",
    "out_height", "out_width", "stride", "groups",
)  # fmt: skip


def _training(
    dims: tuple[str, ...], flops: Callable[[Mapping[str, int]], float], *elements: str
) -> tuple[Operator, Operator, Operator]:
    """An operator's `PASSES` in training.

    Args:
        dims: names of the dimensions.
        flops: of the forward pass; each of the two backward products takes as many.
        elements: products of dimensions (``rows*k``): the tensors that move once in a product.
    """

    def moved(d: Mapping[str, int], v: Variant) -> float:
        sizes = (math.prod(d[name] for name in text.split("*")) for text in elements)
        return float(sum(sizes)) * DTYPE_BYTES[v.compute]

    product = Operator(dims, flops, moved)
    both = Operator(dims, lambda d: 2.0 * flops(d), lambda d, v: 2.0 * moved(d, v))
    return product, both, product


def _attention_gradient(op: Operator) -> Operator:
    """Five products for two (Dao, FlashAttention-2, 2023); every tensor has a gradient."""
    return Operator(op.dims, lambda d: 2.5 * op.flops(d), lambda d, v: 2.0 * op.bytes(d, v))


def training_operators(plain: Mapping[str, Operator]) -> dict[str, Operator]:
    """Rows by name: of each operator's `PASSES`, of gradients in one, and of an optimizer's step.

    ``_weight_gradient`` is the backward pass of an operator whose input needs no gradient.

    Args:
        plain: the rows that they are made of.
    """
    recurrent = plain["recurrent"]
    by_passes = {
        "linear": _training(
            ("rows", "n", "k"), plain["linear"].flops, "rows*n", "rows*k", "n*k"
        ),
        "conv2d": _training(
            _CONVOLUTION,
            lambda d: (
                2.0 * d["batch"] * d["filters"] * d["out_height"] * d["out_width"]
                * d["channels"] // d["groups"] * d["kernel_height"] * d["kernel_width"]
            ),
            "batch*channels*height*width", "batch*filters*out_height*out_width",
        ),
        "attention": _training(
            ("batch", "queries", "keys", "heads", "head_dim"),
            lambda d: 4.0 * d["batch"] * d["heads"] * d["head_dim"] * d["queries"] * d["keys"],
            "batch*queries*heads*head_dim", "batch*keys*heads*head_dim",
        ),
        # Of images or (a height of 1) of rows; ``taps`` elements a window.
        "pool": _training(
            ("batch", "channels", "height", "width", "out_height", "out_width", "taps"),
            lambda d: (
                1.0 * d["batch"] * d["channels"] * d["out_height"] * d["out_width"] * d["taps"]
            ),
            "batch*channels*height*width", "batch*channels*out_height*out_width",
        ),
        "matmul": _training(
            ("batch", "rows", "n", "k"),
            lambda d: 2.0 * d["batch"] * d["rows"] * d["n"] * d["k"],
            "batch*rows*n", "batch*rows*k", "batch*n*k",
        ),
        "embedding": _training(("rows", "vocab", "cols"), lambda d: 0.0, "rows*cols", "rows*cols"),
        # Sums ``rows`` rows of the table in ``bags``.
        "embedding_bag": _training(
            ("rows", "bags", "vocab", "cols"), lambda d: 1.0 * d["rows"] * d["cols"],
            "rows*cols", "bags*cols",
        ),
        "norm": _training(_ROWS, plain["norm"].flops, "rows*cols", "rows*cols"),
        "softmax": _training(_ROWS, plain["norm"].flops, "rows*cols", "rows*cols"),
        "activation": _training(_ROWS, plain["activation"].flops, "rows*cols", "rows*cols"),
        "elementwise": _training(_ROWS, plain["add"].flops, *["rows*cols"] * 3),
        "cross_entropy": _training(_ROWS, plain["norm"].flops, "rows*cols"),
    }  # fmt: skip
    return {
        **{
            f"{op}_{name}": row
            for op, passes in by_passes.items()
            for name, row in zip(PASSES, passes, strict=True)
        },
        **{
            f"{op}_gradient": _attention_gradient(plain[op])
            for op in ("attention", "full_attention")
        },
        # By states and weights, as many FLOP each.
        "recurrent_gradient": Operator(
            recurrent.dims,
            lambda d: 2.0 * recurrent.flops(d),
            lambda d, v: 2.0 * recurrent.bytes(d, v),
        ),
        "optimizer_step": Operator(
            ("parameters", "tensors"),
            lambda d: 4.0 * d["parameters"],
            # Gradient, master and state are read, the latter two written.
            lambda d, v: (7.0 if v.kernel == "torch.adamw" else 5.0) * 4.0 * d["parameters"],
        ),
    }
