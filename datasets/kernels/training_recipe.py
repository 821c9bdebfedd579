"""`Recipe`: how a linear layer carries out a variant of training, and which variants there are.

The planner's variants (`foreplan.datasets.kernels.training_variant`) come first; those that it does
not decide about (fp16, one scale a tensor) can be carried out all the same and stand in
`MORE_VARIANTS`, in the same spelling:
``STORAGE/FORWARD/KERNEL[+BACKWARD][@tensor]``. ``@bits4`` and ``@bits3`` round all 8-bit operands
to so few bits: an emulation of smaller formats, at the speed of int8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from foreplan.datasets.kernels.training_variant import MULTIPLES, TRAINING_VARIANTS
from foreplan.errors import SpecError

Operator = Literal["linear", "conv2d", "embedding", "other"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one module computes.

    Attributes:
        text: the variant.
        operator: kind of module it is for; ``other`` = any.
        forward: dtype of the forward product.
        backward: dtype of both backward products.
        output: dtype of the result.
        saved: dtype in which input and weight are kept for the backward pass.
        along: scales of 8-bit operands: one a row or one a tensor.
        kinds: kinds of device it runs on.
        limit: largest magnitude of 8-bit values, where fewer bits than they have are emulated.
    """

    text: str
    operator: Operator
    forward: str
    backward: str
    output: str
    saved: str
    along: Literal["row", "tensor"] = "row"
    kinds: tuple[str, ...] = ("cpu", "cuda")
    limit: int | None = None


_CUDA = ("cuda",)

#: Variants of linears beyond the planner's: forward, backward, output, saved, along, kinds.
MORE_VARIANTS: Mapping[str, Recipe] = MappingProxyType(
    {
        recipe.text: recipe
        for recipe in (
            Recipe("fp32/fp16/torch.linear", "linear", "fp16", "fp16", "fp16", "fp16", kinds=_CUDA),
            Recipe(
                "fp32/int8/torch.int_mm+bf16@tensor", "linear", "int8", "bf16", "bf16", "int8",
                "tensor",
            ),
            *(
                Recipe(
                    f"fp32/int8/torch.int_mm+{back}@bits{bits}", "linear", "int8", back,
                    "fp32" if back == "fp32" else "bf16", "int8", limit=2 ** (bits - 1) - 1,
                )
                for bits in (4, 3)
                for back in ("fp32", "bf16", "int8")
            ),
            Recipe("fp32/fp8/torch.scaled_mm+fp8@tensor", "linear", "fp8", "fp8", "bf16", "fp8",
                   "tensor", kinds=_CUDA),
            Recipe("fp32/fp32/torch.module", "other", "fp32", "fp32", "fp32", "fp32"),
            Recipe("fp32/bf16/torch.module", "other", "bf16", "bf16", "bf16", "bf16"),
            Recipe("fp32/fp16/torch.module", "other", "fp16", "fp16", "fp16", "fp16", kinds=_CUDA),
        )
    }
)  # fmt: skip


def recipe(text: str) -> Recipe:
    """Look up how a variant is carried out.

    Raises:
        SpecError: no such variant.
    """
    known = TRAINING_VARIANTS.get(text)
    found = MORE_VARIANTS.get(text)
    if known is not None:
        word = text.rpartition(".")[2].partition("+")[0]
        operator: Operator = "linear"
        if word in ("conv2d", "embedding"):
            operator = "conv2d" if word == "conv2d" else "embedding"
        found = Recipe(
            text, operator, known.forward, known.backward, known.output, known.saved, known.along,
            known.kinds,
        )  # fmt: skip
    if found is None:
        names = ", ".join((*TRAINING_VARIANTS, *MORE_VARIANTS))
        raise SpecError("training variant", got=text, expected=f"one of {names}")
    return found


def multiple_of(found: Recipe) -> int:
    """What the features of a linear have to be multiples of."""
    return max(MULTIPLES.get(dtype, 1) for dtype in (found.forward, found.backward, found.saved))
