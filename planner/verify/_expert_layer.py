"""A decoder layer whose MLP is a mixture of experts, with its packed weights.

Every expert's two linears are kernels of the layer's precision, the router and the gate of a shared
expert stay in bf16 (reference: fp32). See `foreplan.datasets.kernels._expert_mlps` for what is
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from foreplan.datasets.experts import Experts
from foreplan.datasets.kernels.expert_kernels import expert_mlps, grouped_experts
from foreplan.datasets.kernels.registry import LinearKernel, Packed, function, linear_kernel
from foreplan.datasets.models.decoder_programs import fixed_variant
from foreplan.datasets.models.model import Model
from foreplan.datasets.models.weights import WeightSource
from foreplan.datasets.program import Variant
from foreplan.planner.verify._decoder_layer import (
    DecoderLayer,
    Linear,
    Pass,
    RunLinear,
    keep,
    nbytes,
    normed,
    pack,
    reference_run,
)


class ExpertLayer(DecoderLayer):
    """See `DecoderLayer`; for a layer of class ``moe``."""

    def _load_mlp(
        self, model: Model, index: int, weights: WeightSource, linears: tuple[Variant, Variant],
        device: torch.device, *, reference: bool,
    ) -> tuple[Linear, ...]:  # fmt: skip
        """Load the experts, and give up and down of the shared one."""
        experts = model.experts
        assert experts is not None  # only such models have layers of this class
        dtype = torch.float32 if reference else torch.bfloat16
        routing = experts.routing
        self._router = keep(weights.tensor(index, "router.weight"), device, dtype)
        self._correction: Tensor | None = None
        if routing.corrected:
            correction = weights.tensor(index, "router.correction")
            self._correction = keep(correction, device, torch.float32)
        self._router_bias: Tensor | None = None
        if routing.biased:
            self._router_bias = keep(weights.tensor(index, "router.bias"), device, dtype)
        self._choice = (
            experts.active, experts.normalise, self._correction, routing.groups,
            routing.kept_groups, self._router_bias,
        )  # fmt: skip
        self._gate: Tensor | None = None
        if experts.shared_gate:
            self._gate = keep(weights.tensor(index, "shared_gate.weight"), device, dtype)
        self._route = function("router", fixed_variant(model, "router"))
        self._scale = function("shared_gate", fixed_variant(model, "shared_gate"))
        self._experts = expert_mlps()
        self._shared: tuple[Linear, ...] = ()
        if experts.shared_ffn:
            self._shared = tuple(
                Linear(weights, index, name, linears, device, reference=reference)
                for name in ("shared_up", "shared_down")
            )
        self._load_experts(experts, index, weights, linears, device, reference=reference)
        return self._shared

    def _load_experts(
        self, experts: Experts, index: int, weights: WeightSource,
        linears: tuple[Variant, Variant], device: torch.device, *, reference: bool,
    ) -> None:  # fmt: skip
        """Load the routed experts, one by one and, where a GPU runs them so, as one."""
        kernels = [linear_kernel(variant, device.type) for variant in linears]
        planned: Any = (kernel.run for kernel in kernels)  # they take what the lists below hold
        self._run: tuple[RunLinear, ...] = (reference_run,) * 2 if reference else (*planned,)
        stacks, (ups, downs) = zip(*(
            _stacked(kernels[0], weights, index, name, experts.count, device)
            for name in ("up", "down")
        ), strict=True)  # fmt: skip
        self._ups: list[Packed | Tensor] = [*ups]
        self._downs: list[Packed | Tensor] = [*downs]
        self._grouped: list[Callable[..., Tensor] | None] = [None, None]
        self._all: list[Packed] = []
        if reference:
            self._ups = [kernels[0].dequantise(each) for each in ups]
            self._downs = [kernels[0].dequantise(each) for each in downs]
        else:
            sizes = self._router.shape[1], experts.ffn
            self._grouped = [grouped_experts(v, str(device), *sizes) for v in linears]
        if any(self._grouped):
            self._all = [
                _below_one_another(views[0], stack)
                for views, stack in zip((ups, downs), stacks, strict=True)
            ]
        dtype = torch.float32 if reference else torch.bfloat16
        self._up_biases, self._down_biases = (
            _stacked_biases(weights, index, name, experts.count, device, dtype)
            for name in ("up", "down")
        )

    @property
    def recordable(self) -> bool:
        """See `DecoderLayer.recordable`."""
        return None not in self._grouped

    def feed(self, x: Tensor, now: Pass) -> Tensor:
        """What the experts add to the residual stream ``x``."""
        x = normed(self._norm2, x)
        chosen, share = self._route(x, self._router, *self._choice)
        out: Tensor
        biases = self._up_biases, self._down_biases
        if grouped := self._grouped[now.phase]:
            out = grouped(x, chosen, share, *self._all, self._activate, biases)
        else:
            out = self._experts(
                x, chosen, share, self._ups, self._downs, self._run[now.phase], self._activate,
                biases,
            )  # fmt: skip
        if not self._shared:
            return out
        up, down = self._shared
        gate, wide = up.run[now.phase](x, up.weight, up.bias).chunk(2, 1)
        shared = down.run[now.phase](self._activate(gate, wide), down.weight, down.bias)
        if self._gate is not None:
            shared = self._scale(shared, x, self._gate)
        added: Tensor = self._add(out, shared)
        return added

    @property
    def bytes(self) -> int:
        """Memory of all weights, scales and norms, those of every expert."""
        held = [
            each.bytes if isinstance(each, Packed) else nbytes(each)
            for each in (*self._ups, *self._downs)
        ]
        kept = sum(
            map(
                nbytes,
                (self._router, self._correction, self._gate, self._router_bias, self._up_biases,
                 self._down_biases),
            )
        )  # fmt: skip
        return super().bytes + kept + sum(held)


def _stacked_biases(
    weights: WeightSource, layer: int, name: str, count: int, device: torch.device,
    dtype: torch.dtype,
) -> Tensor | None:  # fmt: skip
    """Biases of one linear of every expert, ``[experts, n]``; ``None`` where a layer has none.

    Of a layer that devices share only one of them has those that are added to a sum.
    """
    if f"expert.0.{name}.bias" not in weights.names(layer):
        return None
    each = [weights.tensor(layer, f"expert.{expert}.{name}.bias") for expert in range(count)]
    return keep(torch.stack(each), device, dtype)


def _stacked(
    kernel: LinearKernel, weights: WeightSource, layer: int, name: str, count: int,
    device: torch.device,
) -> tuple[dict[str, Tensor], list[Packed]]:  # fmt: skip
    """One linear of every expert, as views of few large tensors ``[experts, ...]``.

    An expert's own tensors are small: kept one by one between temporaries of their size, they would
    leave the heap full of holes, which a memory cap counts (a stage of 188 MiB took 239).
    """
    stacks: dict[str, Tensor] = {}
    made = []
    for expert in range(count):
        packed = pack(kernel, weights, layer, f"expert.{expert}.{name}.weight", device)
        views = {}
        for role, tensor in packed.tensors.items():
            if role not in stacks:
                stacks[role] = tensor.new_empty((count, *tensor.shape))
            views[role] = stacks[role][expert].copy_(tensor)
        made.append(Packed(packed.layout, packed.n, packed.k, views))
    return stacks, made


def _below_one_another(one: Packed, stacks: Mapping[str, Tensor]) -> Packed:
    """All experts' weights as one, of layouts whose tensors begin with output features."""
    whole = {role: stack.flatten(0, 1) for role, stack in stacks.items()}
    return Packed(one.layout, len(stacks["weight"]) * one.n, one.k, whole)
