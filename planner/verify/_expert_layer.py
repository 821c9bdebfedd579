"""A decoder layer whose MLP is a mixture of experts, with its packed weights.

Every expert's two linears are kernels of the layer's precision, the router and the gate of a shared
expert stay in bf16 (reference: fp32). See `foreplan.datasets._expert_mlps` for what is computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foreplan.datasets.decoder_programs import fixed_variant
from foreplan.datasets.kernels import expert_mlps, function
from foreplan.datasets.model import Model
from foreplan.datasets.program import Variant
from foreplan.datasets.weights import WeightSource
from foreplan.planner.verify._decoder_layer import DecoderLayer, Linear, Pass, keep, nbytes


class ExpertLayer(DecoderLayer):
    """See `DecoderLayer`; for a layer of class ``moe``."""

    def _load_mlp(
        self,
        model: Model,
        index: int,
        weights: WeightSource,
        linears: tuple[Variant, Variant],
        device: torch.device,
        *,
        reference: bool,
    ) -> tuple[Linear, ...]:
        """Up and down of every expert, then of the shared one."""
        experts = model.experts
        assert experts is not None  # only such models have layers of this class
        dtype = torch.float32 if reference else torch.bfloat16
        self._active, self._normalise = experts.active, experts.normalise
        self._router = keep(weights.tensor(index, "router.weight"), device, dtype)
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
        made = [
            tuple(
                Linear(weights, index, f"expert.{expert}.{name}", linears, device,
                       reference=reference)
                for name in ("up", "down")
            )
            for expert in range(experts.count)
        ]  # fmt: skip
        self._run = made[0][0].run
        self._ups = [up.weight for up, _ in made]
        self._downs = [down.weight for _, down in made]
        return (*(linear for pair in made for linear in pair), *self._shared)

    def feed(self, x: Tensor, now: Pass) -> Tensor:
        """What the experts add to the residual stream ``x``."""
        normed = self._norm2(x)
        chosen, share = self._route(normed, self._router, self._active, self._normalise)
        out: Tensor = self._experts(
            normed, chosen, share, self._ups, self._downs, self._run[now.phase], self._activate
        )
        if not self._shared:
            return out
        up, down = self._shared
        gate, wide = up.run[now.phase](normed, up.weight, up.bias).chunk(2, 1)
        shared = down.run[now.phase](self._activate(gate, wide), down.weight, down.bias)
        if self._gate is not None:
            shared = self._scale(shared, normed, self._gate)
        added: Tensor = self._add(out, shared)
        return added

    @property
    def bytes(self) -> int:
        """Memory of all weights, scales and norms, those of every expert."""
        return super().bytes + nbytes(self._router) + nbytes(self._gate)
