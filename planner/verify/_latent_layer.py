"""Decoder layers with attention over latents, with their packed weights.

Runs the programs of `foreplan.datasets.models.latent_programs`: several new tokens expanded, one
absorbed, as the attention's kernel of each phase says. Shape legend: B = batch, T = tokens of a
pass, H = heads, L = positions of the cache, R = features of a latent, E = turned features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foreplan.datasets.kernels.registry import function, kernels_for
from foreplan.datasets.models.decoder_programs import HEAD_NORM
from foreplan.datasets.models.latent import LATENT_NORM_EPS
from foreplan.datasets.models.latent_programs import ABSORB, EXPAND, EXPAND_HEADS, RESTORE
from foreplan.datasets.models.model import Model
from foreplan.datasets.models.weights import WeightSource
from foreplan.datasets.program import Variant
from foreplan.planner.verify._decoder_layer import (
    Cache,
    DecoderLayer,
    Linear,
    Norm,
    Pass,
    keep,
    nbytes,
    normed,
)
from foreplan.planner.verify._expert_layer import ExpertLayer


class LatentLayer(DecoderLayer):
    """See `DecoderLayer`; both caches it is given are one, ``[B, 1, L, R + E]``."""

    def _load_attention(
        self, model: Model, index: int, weights: WeightSource, linears: tuple[Variant, Variant],
        device: torch.device, *, reference: bool,
    ) -> tuple[Linear, ...]:  # fmt: skip
        """Load what makes latents and heads, and give latents, queries and out."""
        latent = model.latent
        assert latent is not None  # only such models have layers of this class
        self._latent, self._score_scale = latent, latent.width**-0.5
        dtype = torch.float32 if reference else torch.bfloat16
        self._latent_norm, self._query_norm = (
            Norm(weights, index, name, device, dtype, HEAD_NORM) if there else None
            for name, there in (
                ("latent_norm", True), ("query_norm", latent.query_rank is not None)
            )
        )  # fmt: skip
        for norm in (self._latent_norm, self._query_norm):
            if norm is not None:
                norm.eps = LATENT_NORM_EPS
        self._expanding = keep(weights.tensor(index, "expand.weight"), device, dtype)
        by_head = self._expanding.view(model.heads, -1, latent.rank)
        self._to_latent, self._to_value = by_head.split_with_sizes((latent.plain, latent.value), 1)
        self._expand, self._absorb, self._restore = (
            function("matmul", variant) for variant in (EXPAND, ABSORB, RESTORE)
        )
        self._expand_heads = function("expand_heads", EXPAND_HEADS)
        return tuple(
            Linear(weights, index, name, linears, device, reference=reference)
            for name in ("latents", "queries", "out")
        )

    def _attention_of(self, variant: Variant) -> Callable[..., Tensor]:
        if variant in kernels_for("latent_attention", "cpu"):
            return self._absorbed(function("latent_attention", variant))
        return self._expanded(super()._attention_of(variant))

    def attend(self, x: Tensor, now: Pass, cache_k: Cache, cache_v: Cache) -> Tensor:
        """See `DecoderLayer.attend`."""
        assert isinstance(cache_k, Tensor)  # a cache of latents is a plain one
        phase, batch, tokens, position, keys, turns, _ = now
        latent, (latents, queries, out) = self._latent, self._projections
        x = normed(self._norm1, x)
        made = latents.run[phase](x, latents.weight, latents.bias)
        known, key, wanted = made.split_with_sizes(
            (latent.rank, latent.turned, made.shape[1] - latent.cached), 1
        )
        if self._query_norm is not None:
            x = self._query_norm(wanted)
        q = queries.run[phase](x, queries.weight, queries.bias)
        q = q.view(batch, tokens, self._heads, latent.width)
        del x
        known = normed(self._latent_norm, known).view(batch, tokens, 1, latent.rank)
        turn = turns[self._turn]
        turned_q = self._rope(q[..., latent.plain :], *turn)
        key = self._rope(key.reshape(batch, tokens, 1, latent.turned), *turn)
        first, second = cache_k.split_with_sizes((latent.rank, latent.turned), -1)
        self._write(first, second, known, key, position)
        attended = self._attend[phase](q, turned_q, known, key, cache_k, keys)
        return out.run[phase](attended, out.weight, out.bias)

    def _expanded(self, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Attention of several tokens by a kernel of whole heads, ``[B * T, H * V]``."""

        def run(
            q: Tensor, turned_q: Tensor, known: Tensor, key: Tensor, _: Cache, keys: int
        ) -> Tensor:
            wide = self._expand(known.view(1, -1, self._latent.rank), self._expanding[None])
            wide = wide.view(*q.shape[:-1], -1)
            q, k, v = self._expand_heads(q, turned_q, key, wide)
            out = attend(q, k, v, keys)[..., : self._latent.value]
            return out.reshape(-1, self._heads * self._latent.value)

        return run

    def _absorbed(self, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Attention of one token to the cache, ``[B, H * V]``."""

        def run(
            q: Tensor, turned_q: Tensor, _: Tensor, __: Tensor, cache: Cache, keys: int
        ) -> Tensor:
            plain = q[:, 0, :, : self._latent.plain].transpose(0, 1)
            found = attend(
                self._absorb(plain, self._to_latent), turned_q, cache, keys, self._score_scale
            )
            values: Tensor = self._restore(found, self._to_value)
            return values.transpose(0, 1).reshape(-1, self._heads * self._latent.value)

        return run

    @property
    def bytes(self) -> int:
        """Memory of all weights, scales, biases and norms."""
        norms = (self._latent_norm, self._query_norm)
        beside = sum(norm.bytes for norm in norms if norm is not None)
        return super().bytes + nbytes(self._expanding) + beside


class LatentExpertLayer(LatentLayer, ExpertLayer):
    """See `LatentLayer` and `ExpertLayer`."""
