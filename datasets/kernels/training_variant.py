"""`TrainingVariant`: how an operator with a weight is computed in training, by the variant's text.

All storage is fp32: the master weight. A variant's text names dtype and kernel of the forward
pass; what follows ``+`` is the dtype of the backward pass of 8-bit kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from foreplan.datasets.program import Variant
from foreplan.errors import SpecError

Precision = Literal["fp32", "tf32", "bf16", "fp8", "int8", "int8-all", "int8-tensor"]
#: From the highest to the lowest. ``int8-all`` rounds the gradient of the backward products too;
#: ``int8-tensor`` does so with one scale a tensor and to nearest.
PRECISIONS: tuple[Precision, ...] = (
    "fp32", "tf32", "bf16", "fp8", "int8", "int8-all", "int8-tensor"
)  # fmt: skip
#: Dtypes with scales.
EIGHT_BITS = ("int8", "fp8")


@dataclass(frozen=True, slots=True)
class TrainingVariant:
    """How an adjustable operator is computed in training.

    Attributes:
        precision: word that users give.
        forward: dtype of the forward product; its operands are cast or quantised to it.
        backward: dtype of both backward products; grad_output and the saved operands are cast or
            dequantised to it. The gradient of the weight comes out fp32, that of the input in
            ``backward``.
        output: dtype of the result.
        saved: dtype in which input and weight are kept for the backward pass; fp32 keeps no copy
            of the weight, because the master is there.
        kinds: kinds of device that can have a kernel for it.
        along: scales of 8-bit operands: one a row or one a tensor.
    """

    precision: Precision
    forward: str
    backward: str
    output: str
    saved: str
    kinds: tuple[str, ...] = ("cpu", "cuda")
    along: Literal["row", "tensor"] = "row"

    @property
    def operand(self) -> str:
        """Dtype that the forward product's operands are stored in: tf32 reads fp32."""
        return "fp32" if self.forward == "tf32" else self.forward

    @property
    def returned(self) -> str:
        """Dtype of the input's gradient: products of 8-bit operands hand on bf16."""
        if self.backward in EIGHT_BITS:
            return "bf16"
        return "fp32" if self.backward == "tf32" else self.backward


_CUDA = ("cuda",)
#: int8 and fp8 (e4m3): symmetric, one scale a row of the input and a row of the weight, round to
#: nearest; gradients of ``int8-all`` stochastically. int8 has int32 sums, and its scale is chosen
#: so that they are exact (`foreplan.datasets.kernels._kernels_cpu.int8_limit`). With one scale a
#: tensor, as QSync's kernels have it, one rounding of the gradient serves both of its products.
TRAINING_VARIANTS: Mapping[str, TrainingVariant] = MappingProxyType(
    {
        "fp32/fp32/torch.linear": TrainingVariant("fp32", "fp32", "fp32", "fp32", "fp32"),
        "fp32/tf32/torch.linear": TrainingVariant("tf32", "tf32", "tf32", "fp32", "fp32", _CUDA),
        "fp32/bf16/torch.linear": TrainingVariant("bf16", "bf16", "bf16", "bf16", "bf16"),
        "fp32/fp8/torch.scaled_mm+bf16": TrainingVariant(
            "fp8", "fp8", "bf16", "bf16", "fp8", _CUDA
        ),
        "fp32/fp8/torch.scaled_mm+fp8": TrainingVariant("fp8", "fp8", "fp8", "bf16", "fp8", _CUDA),
        "fp32/int8/torch.int_mm+bf16": TrainingVariant("int8", "int8", "bf16", "bf16", "int8"),
        "fp32/int8/torch.int_mm+fp32": TrainingVariant("int8", "int8", "fp32", "fp32", "int8"),
        "fp32/int8/torch.int_mm+int8": TrainingVariant("int8-all", "int8", "int8", "bf16", "int8"),
        "fp32/int8/torch.int_mm+int8@tensor": TrainingVariant(
            "int8-tensor", "int8", "int8", "bf16", "int8", along="tensor"
        ),
        "fp32/fp32/torch.conv2d": TrainingVariant("fp32", "fp32", "fp32", "fp32", "fp32"),
        "fp32/bf16/torch.conv2d": TrainingVariant("bf16", "bf16", "bf16", "bf16", "bf16"),
        # The rows are read in fp32 and handed on in bf16; nothing but ids is saved.
        "fp32/fp32/torch.embedding": TrainingVariant("fp32", "fp32", "fp32", "fp32", "fp32"),
        "fp32/bf16/torch.embedding": TrainingVariant("bf16", "fp32", "fp32", "bf16", "fp32"),
    }
)
_FAMILIES: Mapping[str, tuple[str, ...]] = {
    "linear": ("torch.linear", "torch.int_mm", "torch.scaled_mm"),
    "conv2d": ("torch.conv2d",),
    "embedding": ("torch.embedding",),
}


def training_variant(text: str) -> TrainingVariant:
    """Look a variant up.

    Raises:
        SpecError: no such variant.
    """
    found = TRAINING_VARIANTS.get(text)
    if found is None:
        raise SpecError(
            "training variant", got=text, expected=f"one of {', '.join(TRAINING_VARIANTS)}"
        )
    return found


#: What both features of a linear have to be multiples of; ``torch._int_mm`` leaves memory unset for
#: some shapes that are not.
MULTIPLES: Mapping[str, int] = MappingProxyType({"int8": 8, "fp8": 16})


def variants_of(op: str, *, n: int = 0, k: int = 0, kind: str | None = None) -> tuple[str, ...]:
    """Texts of the variants of ``linear``, ``conv2d`` or ``embedding``, fp32 first.

    Args:
        op: the operator.
        n: output features of a linear; 8-bit products need `MULTIPLES`.
        k: input features, likewise.
        kind: ``cpu`` or ``cuda``; any if ``None``.
    """
    return tuple(
        text
        for text, row in TRAINING_VARIANTS.items()
        if Variant.parse(text).kernel.partition("+")[0] in _FAMILIES[op]
        and n % MULTIPLES.get(row.forward, 1) == k % MULTIPLES.get(row.forward, 1) == 0
        and (kind is None or kind in row.kinds)
    )
