"""Model FLOP utilisation: how much of the devices' peak a training step turns into the model.

Model FLOP of one token (``theory``, forward and backward, no recomputation):

    6 N + 12 l h s

N parameters used in matrix products, each multiplied and added once forwards and twice backwards;
l layers of width h whose attention multiplies with s positions twice (full, not causal). Source:
Narayanan et al. 2021, appendix, and Chowdhery et al. 2022 (PaLM), appendix B; it gives the MFU that
MegaScale (NSDI 2024, table 2) prints with h = 12288, l = 96, s = 2048, a vocabulary of 64,000 and
312 TFLOP/s a GPU.
"""

from __future__ import annotations

from foreplan.errors import SpecError


def decoder_parameters(*, layers: int, hidden: int, vocabulary: int) -> int:
    """Parameters in matrix products of a decoder with an MLP of 4 h: 12 l h^2 and the head, V h."""
    return 12 * layers * hidden**2 + vocabulary * hidden


def training_flops_per_token(
    *, parameters: float, layers: int, hidden: int, sequence: int
) -> float:
    """FLOP that one token of a training step needs, forward and backward."""
    return 6.0 * parameters + 12.0 * layers * hidden * sequence


def model_flops_utilisation(
    *, flops_per_token: float, tokens: float, step_s: float, devices: int, peak_flops: float
) -> float:
    """Share of the devices' dense peak that a step uses.

    Args:
        flops_per_token: from `training_flops_per_token`.
        tokens: tokens of one step, over all devices.
        step_s: seconds of one step.
        devices: number of devices.
        peak_flops: dense peak of one device in FLOP/s, in the dtype that is computed in.

    Raises:
        SpecError: a time, a number of devices or a peak that is not positive.
    """
    for name, value in (("step_s", step_s), ("devices", devices), ("peak_flops", peak_flops)):
        if not value > 0:
            raise SpecError(f"utilisation {name}", got=value, expected="more than 0")
    return flops_per_token * tokens / (step_s * devices * peak_flops)
