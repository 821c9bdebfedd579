"""`rotation`: the tables by which a decoder's queries and keys are turned by their position."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foreplan.datasets.models.model import Model
from foreplan.datasets.models.rotary import RopeScaling, RotationKind


def rotation(model: Model, positions: int, kind: RotationKind = "global") -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles, fp32 ``[positions, head_dim]``, halves repeated.

    Frequencies as in transformers, ``modeling_rope_utils``: ``theta^(-2i/D)``, where ``D`` are the
    features of a head that are turned, and stretched by `RopeScaling`. Features that are not turned
    follow them (`Rotary.order`) and have angle 0: cosine 1 and sine 0, which changes no bit.

    Args:
        model: the model.
        positions: of the tables.
        kind: of the layers that are turned by them.
    """
    width = 0 if kind == "none" else model.rotary.width or model.head_dim
    half = torch.arange(0, width, 2, dtype=torch.float32) / max(width, 1)
    theta, scaling = model.rope_theta, model.rope_scaling
    if kind == "local":
        theta, scaling = model.rotary.local_theta or theta, None
    frequency = 1.0 / theta**half
    if scaling is not None:
        frequency = _stretched(frequency, scaling, theta)
    angle = torch.arange(positions, dtype=torch.float32)[:, None] * frequency
    factor = 1.0 if scaling is None else scaling.attention_factor
    kept = torch.ones(positions, (model.head_dim - width) // 2)
    cos = torch.cat((angle.cos() * factor, kept), dim=-1)
    sin = torch.cat((angle.sin() * factor, torch.zeros_like(kept)), dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


def _stretched(frequency: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    if scaling.kind == "linear":
        return frequency / scaling.factor
    if scaling.kind == "longrope":
        return frequency / torch.tensor(scaling.short_factors)
    if scaling.kind == "yarn":
        kept = _kept_by_yarn(len(frequency), scaling, theta)
        return frequency / scaling.factor * (1 - kept) + frequency * kept
    wavelength = 2 * math.pi / frequency
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (scaling.original_max_positions / wavelength - low) / (high - low)
    # 0 beyond the low wavelength (stretched in full), 1 below the high one (kept).
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def _kept_by_yarn(pairs: int, scaling: RopeScaling, theta: float) -> Tensor:
    """How much of each pair's frequency is kept, 1 to 0 from the fastest pair on."""
    width = 2 * pairs

    def pair_of(turns: float) -> float:
        """The pair, not a whole number, that turns so many times over the original positions."""
        wavelength = scaling.original_max_positions / turns
        return width * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_of(scaling.fast_turns), pair_of(scaling.slow_turns)
    if scaling.whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += 0.001  # as transformers, which would divide by zero
    return 1 - ((torch.arange(pairs, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
