"""Errors that storing a trained model's linears at fewer bits leaves; imports torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from foreplan.cost_models.quantised_decoder import storage_kernel
from foreplan.datasets.model import Model
from foreplan.datasets.weights import open_weights


def layer_weight_errors(model: Model, bits: Sequence[int]) -> npt.NDArray[np.float64]:
    """Relative squared error of every layer, ``[layers, len(bits)]``; see ``sensitivity.py``.

    Each linear is packed by the very layout that would store it and read back.
    """
    weights = open_weights(model)
    found = np.zeros((model.layers, len(bits)))
    for layer in range(model.layers):
        for linear in model.linears:
            exact = weights.tensor(layer, f"{linear.name}.weight").float()
            power = float(exact.square().sum())
            for column, count in enumerate(bits):
                if count < 16 and power > 0:
                    kernel = storage_kernel(count, linear.n, linear.k)
                    error = kernel.dequantise(kernel.pack(exact)) - exact
                    found[layer, column] += float(error.square().sum()) / power
    return found
