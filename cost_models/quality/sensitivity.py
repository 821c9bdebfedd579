"""Quality indicators: how much a layer's output suffers from fewer bits (omega).

The indicator of this module needs weights only: the squared error that storing a layer's linears at
b bits leaves, relative to the squared weights, summed over the layer's linears. It ranks layers and
bits; it is not a loss in perplexity. For random weights every layer is alike and the uniform
quantiser's law is used instead (``theory``: variance of a step of range / (2^(b-1) - 1)).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from foreplan.datasets.models.model import Model


def weight_sensitivity(model: Model, bits: Sequence[int]) -> npt.NDArray[np.float64]:
    """Quality loss of each layer at each number of bits.

    Args:
        model: with ``weights == "trained"``, its folder is read, which imports torch.
        bits: numbers of bits; 16 counts as lossless.

    Returns:
        ``[layers, len(bits)]``, dimensionless, at least 0.

    Raises:
        SpecError: a trained model's folder cannot be read.
    """
    if model.weights == "random":
        # Range over deviation of n normal weights is about 2 sqrt(2 ln n); groups of 64 and rows of
        # thousands differ by less than 2x, which only scales omega.
        row = np.array([0.0 if b >= 16 else 1.0 / (2 ** (b - 1) - 1) ** 2 for b in bits])
        return np.tile(row, (model.layers, 1))
    from foreplan.cost_models.quality._weight_errors import layer_weight_errors

    return layer_weight_errors(model, bits)
