"""`activated_parts`: a product with an activation behind it, by one call (``_addmm_activation``).

A GPU's library applies the activation where it writes the product (``Blas.cpp``, cuBLASLt); torch
goes over it again on a processor. Only fused layers call it (`fused_layers`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from foreplan.datasets.program import Program, Variant, program

KERNEL: Final = "torch._addmm_activation"
#: What the name of its kernel says: the activation is no ReLU.
GELU: Final = "_gelu"


def activates(item: Program) -> bool:
    """Whether a program is such a product."""
    return item.variant.kernel in (KERNEL, KERNEL + GELU)


def activated_parts(item: Program, *, apart: bool) -> list[tuple[Program, int]]:
    """Its parts, and how often each runs.

    Args:
        item: which `activates`.
        apart: whether the activation is a pass of its own.
    """
    product = replace(item, variant=replace(item.variant, kernel="torch.linear"))
    if not apart:
        return [(product, 1)]
    name = "gelu" if item.variant.kernel.endswith(GELU) else "relu_"
    compute = item.variant.compute
    activation = program(
        "elementwise", Variant(compute, compute, f"torch.{name}"),
        rows=item.dims["rows"], cols=item.dims["n"], inputs=1,
    )  # fmt: skip
    return [(product, 1), (activation, 1)]
