"""`LinearShape`: one fused linear of a decoder layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Weight ``[n, k]`` and, with ``bias``, a bias ``[n]``."""

    name: str
    n: int
    k: int
    bias: bool

    @property
    def parameters(self) -> int:
        """Weights and biases."""
        return self.n * self.k + (self.n if self.bias else 0)
