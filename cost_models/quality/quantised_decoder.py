"""`QuantisedDecoder`: a trained decoder in fp32 whose layers can be stored at any number of bits.

A layer at b bits computes with what the kernels' own layout (group scales, rounding, clamping)
reads back, so that what is measured on it is what a plan executes, but for the rounding of
activations. 16 bits are bf16. Of a layer of experts all experts have the layer's bits; its router
stays as it is stored, and so rows choose their experts by what the layers before made of them.
Imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foreplan.datasets.graphs.causal_lm import causal_lm
from foreplan.datasets.kernels.quantised_cache import QuantisedCache
from foreplan.datasets.kernels.registry import LinearKernel, kernels_for, linear_kernel
from foreplan.datasets.models.linear_shape import LinearShape
from foreplan.datasets.models.model import Model
from foreplan.datasets.models.tensor_names import layer_sources
from foreplan.datasets.models.weights import FolderWeights
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


#: Name under which transformers attends to keys and values that were rounded to 8 bits.
_ROUNDED = "foreplan_rounded"
#: Linears of one routed expert, as `QuantisedDecoder.linears` names them.
_EXPERT = re.compile(r"expert\.(\d+)\.(up|down)")
#: Where transformers (5.0) keeps the experts of a layer, all in one parameter ``[E, n, k]``, and
#: those of gpt-oss ``[E, k, n]``.
_STACKS = {"up": "mlp.experts.gate_up_proj", "down": "mlp.experts.down_proj"}


class Piece(NamedTuple):
    """Part of a parameter that rows of a linear are stored in.

    Attributes:
        parameter: its name in the module.
        rows: of the fused ``[n, k]``.
        transposed: whether it is held as ``[k, n]``.
        expert: which of the parameter's matrices, ``None`` where it is one.
    """

    parameter: str
    rows: slice
    transposed: bool = False
    expert: int | None = None

    def of(self, parameter: Tensor) -> Tensor:
        """The part of a tensor in the parameter's shape, as ``[rows, k]``; a view."""
        part = parameter if self.expert is None else parameter[self.expert]
        return part.t() if self.transposed else part


class QuantisedDecoder:
    """A model folder as a module, with its linears replaced layer by layer.

    Args:
        model: with trained weights.
        device: torch device that computes; all weights must fit there in fp32.

    Attributes:
        model: the model.
        module: of transformers, fp32; every layer at 16 bits until told otherwise.

    Raises:
        SpecError: random weights, a folder that does not hold them all, or a family of experts
            that transformers does not keep as expected.
    """

    def __init__(self, model: Model, device: str = "cpu") -> None:
        if model.weights != "trained":
            raise SpecError(
                f"model {model.name}", got=f"{model.weights} weights",
                expected="trained ones: quality of random weights means nothing",
            )  # fmt: skip
        self.model = model
        self.module = causal_lm(model).eval().requires_grad_(False).to(device)
        self._device = device
        self._weights = FolderWeights(model)
        self._sources = [layer_sources(model, layer) for layer in range(model.layers)]
        held = {name for name, _ in self.module.named_parameters()}
        for layer in range(model.layers):
            for linear in self.linears(layer):
                lacking = [p.parameter for p in self.pieces(layer, linear.name)
                           if p.parameter not in held]  # fmt: skip
                if lacking:
                    raise SpecError(
                        f"model {model.name}", got=f"no parameter {lacking[0]} in its module",
                        expected="a family whose experts transformers keeps in one parameter",
                    )  # fmt: skip
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

    def linears(self, layer: int) -> tuple[LinearShape, ...]:
        """The fused linears of a layer; those of its experts as ``expert.3.up``."""
        layer_class = self.model.layer_classes[layer]
        found = self.model.linears_of(layer_class)
        if layer_class == "dense" or self.model.experts is None:
            return found
        routed = (
            dataclasses.replace(linear, name=f"expert.{expert}.{linear.name}")
            for expert in range(self.model.experts.count)
            for linear in self.model.expert_linears
        )
        return (*found, *routed)

    def stored(self, layer: int, bits: int) -> Iterator[tuple[str, Tensor]]:
        """Name and fp32 weight ``[n, k]`` of each linear of a layer as read back at ``bits``."""
        for linear in self.linears(layer):
            exact = self._weights.stored(layer, f"{linear.name}.weight").float()
            kernel = storage_kernel(bits, linear.n, linear.k)
            yield linear.name, kernel.dequantise(kernel.pack(exact))

    def squared_step(self, layer: int, name: str, bits: int) -> float:
        """Mean squared step between neighbouring values of a linear as its layout stores it."""
        exact = self._weights.stored(layer, f"{name}.weight").float()
        tensors = storage_kernel(bits, *exact.shape).pack(exact).tensors
        scale = tensors["scale"] if "scale" in tensors else tensors["scale_and_zero"][..., 0]
        return float(scale.float().square().mean())

    def pieces(self, layer: int, name: str) -> list[Piece]:
        """Parameters of ``module`` that a linear's weight is made of."""
        source = self._sources[layer][f"{name}.weight"]
        if routed := _EXPERT.fullmatch(name):
            base = source.names[0].partition(f".{layer}.")[0]
            parameter = f"{base}.{layer}.{_STACKS[routed[2]]}"
            return [Piece(parameter, slice(None), source.transposed, int(routed[1]))]
        found, row = [], 0
        for parameter, rows in zip(source.names, source.rows, strict=True):
            found.append(Piece(parameter, slice(row, row + rows), source.transposed))
            row += rows
        return found

    @contextlib.contextmanager
    def rounded_cache(self) -> Iterator[None]:
        """Let every layer attend to keys and values as a cache of 8 bits gives them back.

        Raises:
            SpecError: a module that does not attend by transformers' ``sdpa``.
        """
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *more: Any,
                   **named: Any) -> Any:  # fmt: skip
            k, v = (QuantisedCache.of(x).read(x.shape[-2], x.dtype) for x in (key, value))
            return sdpa_attention_forward(module, query, k, v, *more, **named)

        config: Any = self.module.config
        if config._attn_implementation != "sdpa":
            raise SpecError(
                f"model {self.model.name}", got=f"attention by {config._attn_implementation}",
                expected="a family that attends by transformers' sdpa",
            )  # fmt: skip
        AttentionInterface.register(_ROUNDED, attend)
        # Whole windows without padding: no mask beside the causal one, which sdpa then makes.
        AttentionMaskInterface.register(_ROUNDED, lambda *_, **__: None)
        try:
            config._attn_implementation = _ROUNDED
            yield
        finally:
            config._attn_implementation = "sdpa"

    def logits(self, ids: Tensor) -> Tensor:
        """Logits ``[windows, tokens, vocab]`` of int64 ``[windows, tokens]``."""
        out: Any = self.module(input_ids=ids.to(self._device), use_cache=False)
        found: Tensor = out.logits
        return found

    def _write(self, layer: int, name: str, weight: Tensor) -> None:
        with torch.no_grad():
            for piece in self.pieces(layer, name):
                piece.of(self.module.get_parameter(piece.parameter)).copy_(weight[piece.rows])
