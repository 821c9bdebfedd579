"""Errors that storing a trained model's linears at fewer bits leaves; imports torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from foreplan.datasets.kernels import LinearKernel, kernels_for, linear_kernel
from foreplan.datasets.model import Model
from foreplan.datasets.weights import open_weights
from foreplan.errors import SpecError

_STORAGE = {8: "int8", 4: "int4", 3: "int3"}


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
                    kernel = _kernel(count, linear.n, linear.k)
                    error = kernel.dequantise(kernel.pack(exact)) - exact
                    found[layer, column] += float(error.square().sum()) / power
    return found


def _kernel(bits: int, n: int, k: int) -> LinearKernel:
    storage = _STORAGE.get(bits)
    for variant in kernels_for("linear", "cpu", n=n, k=k):
        if variant.storage == storage:
            return linear_kernel(variant, "cpu")
    raise SpecError("bits", got=bits, expected=f"16 or one of {sorted(_STORAGE)}")
