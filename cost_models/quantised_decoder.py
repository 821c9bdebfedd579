"""`QuantisedDecoder`: a trained decoder in fp32 whose layers can be stored at any number of bits.

A layer at b bits computes with what the kernels' own layout (group scales, rounding, clamping)
reads back, so that what is measured on it is what a plan executes, but for the rounding of
activations. 16 bits are bf16. Imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from foreplan.datasets.causal_lm import causal_lm
from foreplan.datasets.kernels import LinearKernel, kernels_for, linear_kernel
from foreplan.datasets.model import Model
from foreplan.datasets.tensor_names import layer_sources
from foreplan.datasets.weights import FolderWeights
from foreplan.errors import SpecError

#: How a number of bits is stored on every kind of device.
STORAGE = {16: "bf16", 8: "int8", 4: "int4", 3: "int3"}


def storage_kernel(bits: int, n: int, k: int) -> LinearKernel:
    """The kernel whose layout stores a weight ``[n, k]`` at so many bits.

    Raises:
        SpecError: no such number of bits.
    """
    for variant in kernels_for("linear", "cpu", n=n, k=k):
        if variant.storage == STORAGE.get(bits):
            return linear_kernel(variant, "cpu")
    raise SpecError("bits", got=bits, expected=f"one of {sorted(STORAGE)}")


class QuantisedDecoder:
    """A model folder as a module, with its linears replaced layer by layer.

    Args:
        model: with trained weights.
        device: torch device that computes; all weights must fit there in fp32.

    Attributes:
        model: the model.
        module: of transformers, fp32; every layer at 16 bits until told otherwise.

    Raises:
        SpecError: random weights, a folder that does not hold them all, or layers of experts.
    """

    def __init__(self, model: Model, device: str = "cpu") -> None:
        if model.weights != "trained":
            raise SpecError(
                f"model {model.name}", got=f"{model.weights} weights",
                expected="trained ones: quality of random weights means nothing",
            )  # fmt: skip
        model.refuse_experts("quality of experts is estimated from the weights alone")
        self.model = model
        self.module = causal_lm(model).eval().requires_grad_(False).to(device)
        self._device = device
        self._weights = FolderWeights(model)
        self._now = [0] * model.layers
        self.set_bits((16,) * model.layers)

    def set_bits(self, bits: Sequence[int]) -> None:
        """Store every layer at its number of bits."""
        for layer, count in enumerate(bits):
            if self._now[layer] != count:
                for name, weight in self.stored(layer, count):
                    self._write(layer, name, weight)
                self._now[layer] = count

    def lower(self, layer: int, bits: int) -> None:
        """Store one layer at so many bits and all others at 16."""
        self.set_bits([bits if i == layer else 16 for i in range(self.model.layers)])

    def stored(self, layer: int, bits: int) -> Iterator[tuple[str, Tensor]]:
        """Name and fp32 weight ``[n, k]`` of each linear of a layer as read back at ``bits``."""
        for linear in self.model.linears:
            exact = self._weights.tensor(layer, f"{linear.name}.weight").float()
            kernel = storage_kernel(bits, linear.n, linear.k)
            yield linear.name, kernel.dequantise(kernel.pack(exact))

    def squared_step(self, layer: int, name: str, bits: int) -> float:
        """Mean squared step between neighbouring values of a linear as its layout stores it."""
        exact = self._weights.tensor(layer, f"{name}.weight").float()
        tensors = storage_kernel(bits, *exact.shape).pack(exact).tensors
        scale = tensors["scale"] if "scale" in tensors else tensors["scale_and_zero"][..., 0]
        return float(scale.float().square().mean())

    def pieces(self, layer: int, name: str) -> list[tuple[str, slice, bool]]:
        """Parameters of ``module`` that a linear's weight is made of.

        Returns:
            Of each its name, its rows of the fused ``[n, k]``, and whether it is held transposed.
        """
        source = layer_sources(self.model, layer)[f"{name}.weight"]
        found, row = [], 0
        for parameter, rows in zip(source.names, source.rows, strict=True):
            found.append((parameter, slice(row, row + rows), source.transposed))
            row += rows
        return found

    def logits(self, ids: Tensor) -> Tensor:
        """Logits ``[windows, tokens, vocab]`` of int64 ``[windows, tokens]``."""
        out: Any = self.module(input_ids=ids.to(self._device), use_cache=False)
        found: Tensor = out.logits
        return found

    def _write(self, layer: int, name: str, weight: Tensor) -> None:
        with torch.no_grad():
            for parameter, rows, transposed in self.pieces(layer, name):
                part = weight[rows]
                self.module.get_parameter(parameter).copy_(part.t() if transposed else part)
