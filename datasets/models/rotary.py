"""`Rotary` and `RopeScaling`: how queries and keys of a decoder are turned by their position."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from foreplan.datasets.specs import StrictModel

#: By which angles a layer turns its heads: those of `Model.rope_theta`, of a base of its own, or
#: none at all.
RotationKind = Literal["global", "local", "none"]


class RopeScaling(StrictModel):
    """How rotary frequencies are stretched beyond the positions a model was first trained on.

    ``linear`` divides every frequency by ``factor``. ``llama3`` divides those whose wavelength
    exceeds ``original_max_positions / low_freq_factor``, keeps those below ``... /
    high_freq_factor`` and interpolates between. ``longrope`` divides each by a factor of its own,
    ``short_factors`` up to ``original_max_positions`` and others beyond, where plans stop; cosine
    and sine are multiplied by ``attention_factor``. ``yarn`` divides the frequencies that turn less
    than ``slow_turns`` times over ``original_max_positions``, keeps those that turn more than
    ``fast_turns`` times and interpolates between by the number of the pair, from whole pair to
    whole pair with ``whole_pairs``; with ``attention_factor`` too (transformers,
    ``modeling_rope_utils``, ``_compute_llama3_parameters``, ``_compute_longrope_parameters`` and
    ``_compute_yarn_parameters``).
    """

    kind: Literal["linear", "llama3", "longrope", "yarn"]
    factor: PositiveFloat
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    original_max_positions: PositiveInt = 8192
    short_factors: tuple[PositiveFloat, ...] = ()
    attention_factor: PositiveFloat = 1.0
    slow_turns: PositiveFloat = 1.0
    fast_turns: PositiveFloat = 32.0
    whole_pairs: bool = True


class Rotary(StrictModel):
    """What heads are turned like, where that is not whole heads, in halves, alike in every layer.

    The runtime turns every head whole, feature ``i`` with ``i + head_dim / 2``, in every layer: the
    rows of queries and keys are put into the order (`order`) in which that is the model's rotation
    when they are loaded, which leaves the products of queries and keys as they are, and features
    that the model does not turn are turned by an angle of 0.

    Attributes:
        width: features of each head that are turned, the first ones; ``None`` = all.
        pairs: feature ``i`` is turned with ``i + width / 2``, or ``2 i`` with ``2 i + 1``.
        local_theta: base of the frequencies in ``local_layers``, which no scaling stretches.
        local_layers: 0-based.
        unrotated_layers: 0-based.
    """

    width: PositiveInt | None = None
    pairs: Literal["halves", "neighbours"] = "halves"
    local_theta: PositiveFloat | None = None
    local_layers: tuple[int, ...] = ()
    unrotated_layers: tuple[int, ...] = ()

    def kind_of(self, layer: int) -> RotationKind:
        """By which angles a layer turns its heads."""
        if layer in self.unrotated_layers:
            return "none"
        return "local" if layer in self.local_layers else "global"

    def order(self, head_dim: int) -> tuple[int, ...]:
        """Features of a head in the order that turns them whole and in halves; empty as they are.

        Args:
            head_dim: features of one head; even, as ``width`` is.
        """
        width = head_dim if self.width is None else self.width
        half, kept = width // 2, tuple(range(width, head_dim))
        if self.pairs == "halves":
            first, second = tuple(range(half)), tuple(range(half, width))
        else:
            first, second = tuple(range(0, width, 2)), tuple(range(1, width, 2))
        middle = len(kept) // 2
        found = (*first, *kept[:middle], *second, *kept[middle:])
        return () if found == tuple(range(head_dim)) else found
