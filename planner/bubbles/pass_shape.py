"""`PassShape`: what a micro-batch looks like inside one tower."""

from __future__ import annotations

from dataclasses import dataclass

from foreplan.planner.bubbles.towers import Tower


@dataclass(frozen=True)
class PassShape:
    """See the module.

    Attributes:
        tower: the tower.
        sequences: sequences of a micro-batch.
        tokens: positions of each.
        tp: devices that share a layer.
        recompute: ``none``, ``selective`` (attention's inside) or ``full`` (the forward pass
            again).
        element_bytes: of activations.
        exit_rows: positions of a micro-batch behind the last layer, which head or projector take;
            fewer than inside where an encoder's positions are averaged.
    """

    tower: Tower
    sequences: int
    tokens: int
    tp: int
    recompute: str
    element_bytes: int
    exit_rows: int

    @property
    def rows(self) -> int:
        """Tokens of a micro-batch."""
        return self.sequences * self.tokens

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one micro-batch between two layers, over all devices of the layer."""
        return self.element_bytes * self.rows * self.tower.hidden
