"""Errors that storing a trained model's linears at fewer bits leaves; imports torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from foreplan.cost_models.quality.quantised_decoder import storage_kernel
from foreplan.datasets.models.model import Model
from foreplan.datasets.models.weights import open_weights


def layer_weight_errors(model: Model, bits: Sequence[int]) -> npt.NDArray[np.float64]:
    """Relative squared error of every layer, ``[layers, len(bits)]``; see ``sensitivity.py``.

    Each linear is packed by the very layout that would store it and read back. The experts of a
    layer count as one linear up and one down, because a row goes through few of them.
    """
    weights = open_weights(model)
    found = np.zeros((model.layers, len(bits)))
    for layer, layer_class in enumerate(model.layer_classes):
        groups = [[linear.name] for linear in model.linears_of(layer_class)]
        if layer_class == "moe" and model.experts is not None:
            groups += [
                [f"expert.{expert}.{linear.name}" for expert in range(model.experts.count)]
                for linear in model.expert_linears
            ]
        for names in groups:
            error, power = np.zeros(len(bits)), 0.0
            for name in names:
                exact = weights.tensor(layer, f"{name}.weight").float()
                power += float(exact.square().sum())
                error += [_squared_error(exact, count) for count in bits]
            if power > 0:
                found[layer] += error / power
    return found


def _squared_error(exact: Tensor, bits: int) -> float:
    if bits >= 16:
        return 0.0
    kernel = storage_kernel(bits, *exact.shape)
    return float((kernel.dequantise(kernel.pack(exact)) - exact).square().sum())
