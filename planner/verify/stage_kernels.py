"""`StageKernels`: which kernels a stage of a decoder computes with, in either phase."""

from __future__ import annotations

from dataclasses import dataclass

from foreplan.datasets.kernels.registry import layout_of
from foreplan.datasets.program import Variant
from foreplan.errors import SpecError


@dataclass(frozen=True, slots=True)
class PhaseKernels:
    """Variants of one operator for the two phases.

    Linears keep one copy of the weight, so that both must use one layout.
    """

    prefill: Variant
    decode: Variant

    @property
    def both(self) -> tuple[Variant, Variant]:
        """Prefill and decode."""
        return self.prefill, self.decode

    def check_layout(self, where: str) -> None:
        """Raise `SpecError` unless one packed weight serves both linear kernels."""
        layouts = [layout_of(variant) for variant in self.both]
        if layouts[0] != layouts[1]:
            raise SpecError(
                f"{where}: kernels {self.prefill} and {self.decode}",
                got=f"layouts {layouts[0]} and {layouts[1]}",
                expected="one layout, so that one copy of the weight serves both phases",
            )


@dataclass(frozen=True, slots=True)
class StageKernels:
    """How a stage computes.

    Attributes:
        layers: of the linears of each of the stage's layers.
        attention: of every layer's attention, which says how keys and values are stored.
        head: of the head; needed where the stage has the last layer.
    """

    layers: tuple[PhaseKernels, ...]
    attention: PhaseKernels
    head: PhaseKernels | None = None
