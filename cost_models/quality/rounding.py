"""`rounding_variance`: the mean squared error of rounding to a low precision, number by number.

Rounding to nearest with step ``q`` leaves an error of variance ``q^2 / 12`` on a residue that is
uniform (theory). For int8 ``q`` is the largest magnitude of the row over 127; for a float with
``k`` stored mantissa bits it is ``2^(e - k)`` at exponent ``e``. Imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from foreplan.errors import SpecError

if TYPE_CHECKING:
    from torch import Tensor

#: Stored mantissa bits (IEEE 754, bfloat16).
MANTISSA_BITS = {"tf32": 10, "fp16": 10, "bf16": 7}
#: Of fp8 e4m3 (OCP 8-bit floating point 1.0, tables 1 and 2): mantissa bits, exponent of the
#: smallest normal number, largest number.
FP8_BITS, FP8_EXPONENT, FP8_LIMIT = 3, -6, 448
#: Largest int8 magnitude.
INT8_LIMIT = 127


def rounding_variance(x: Tensor, dtype: str, along: Literal["row", "tensor"] = "row") -> Tensor:
    """``q^2 / 12`` of every number of ``x`` when it is rounded to ``dtype``.

    Args:
        x: any shape.
        dtype: ``fp32`` (nothing), ``tf32``, ``bf16``, ``fp16``, ``fp8`` or ``int8``.
        along: int8 and fp8 have one scale for each row ``x[..., :]``, or one in all.

    Raises:
        SpecError: another dtype.
    """
    import torch

    if dtype == "fp32":
        return torch.zeros_like(x)
    if dtype == "int8":
        step = _largest(x, along) / INT8_LIMIT
        return (step.square() / 12).expand_as(x)
    if dtype == "fp8":
        scale = _largest(x, along) / FP8_LIMIT
        _, exponent = torch.frexp(x / scale)
        lowest = (exponent - 1).clamp(min=FP8_EXPONENT) - FP8_BITS
        step = scale * torch.ldexp(torch.ones_like(x), lowest)
        return torch.where(scale == 0, 0.0, step.square() / 12)
    if dtype not in MANTISSA_BITS:
        raise SpecError("dtype", got=dtype, expected="fp32, tf32, bf16, fp16, fp8 or int8")
    _, exponent = torch.frexp(x)  # x = m 2^exponent with 0.5 <= |m| < 1
    step = torch.ldexp(torch.ones_like(x), exponent - 1 - MANTISSA_BITS[dtype])
    return torch.where(x == 0, 0.0, step.square() / 12)


def int8_error(x: Tensor) -> Tensor:
    """What rounding ``x`` to nearest in int8 with one scale changes, number by number.

    Where most numbers are small beside the largest they become 0, one and all: an error that is no
    noise.
    """
    import torch

    step = _largest(x, "tensor") / INT8_LIMIT
    return torch.where(step == 0, 0.0, torch.round(x / step) * step - x)


def _largest(x: Tensor, along: Literal["row", "tensor"]) -> Tensor:
    return x.abs().amax(-1, keepdim=True) if along == "row" else x.abs().amax()
