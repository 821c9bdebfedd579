"""One decoder layer with its packed weights: the part of the runtime that is timed.

Runs the programs of `foreplan.datasets.models.decoder_programs.layer_programs` in their order,
through the functions that the profile measured. Everything that can be looked up is looked up when
the layer is built; a pass makes only the calls that compute or that view.

Shape legend: B = batch, T = tokens of a pass, rows = B * T, H = heads, G = key/value heads, L =
positions of the cache, D = head_dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from foreplan.datasets.kernels.quantised_cache import QuantisedCache
from foreplan.datasets.kernels.registry import (
    LinearKernel,
    Packed,
    function,
    linear_kernel,
    reference_linear,
)
from foreplan.datasets.models.attention_window import window_of
from foreplan.datasets.models.decoder_memory import slice_rows
from foreplan.datasets.models.decoder_programs import HEAD_NORM, cache_write_variant, fixed_variant
from foreplan.datasets.models.model import Model
from foreplan.datasets.models.rotary import RotationKind
from foreplan.datasets.models.weights import Part, WeightSource
from foreplan.datasets.program import Variant
from foreplan.planner.verify.windowed import within_window

#: ``run(x, weight, bias)``; a reference run takes the plain fp32 weight.
RunLinear = Callable[[Tensor, Packed | Tensor, Tensor | None], Tensor]
#: Keys or values ``[B, G, L, D]``, plain or quantised.
Cache = Tensor | QuantisedCache

PREFILL, DECODE = 0, 1

#: Dimension of a packed tensor that counts output features, where it is not the first.
_ROW_DIMENSION = {"scale_and_zero": 1}


class Unequal(NamedTuple):
    """How far each request of a pass is, where they are not alike.

    Attributes:
        last: position of each request's last token, int64 ``[B]``.
        each: the same as numbers.
        seen: of one new token a request, which keys each sees, bool ``[B, keys]``; ``None`` of
            prompts, which are padded behind: what is padded sees all, and nothing sees it.
    """

    last: Tensor
    each: tuple[int, ...]
    seen: Tensor | None


class Pass(NamedTuple):
    """What all layers of one pass share.

    Attributes:
        phase: `PREFILL` or `DECODE`.
        batch: B.
        tokens: T.
        position: where in the cache the new tokens begin.
        keys: positions in the cache after the pass.
        turns: cosine and sine ``[T, D]`` of these positions by the kind of a layer's rotation;
            empty without a rotation. Of one new token at unequal positions ``[B, 1, D]``.
        unequal: where requests are of unequal lengths; `position` is then the least and `keys`
            the most.
    """

    phase: int
    batch: int
    tokens: int
    position: int
    keys: int
    turns: Mapping[RotationKind, tuple[Tensor, Tensor]]
    unequal: Unequal | None = None


class Linear:
    """A packed linear with its kernel for each phase.

    Args:
        weights: where to read it; freed again before this returns.
        part, name: which one (``qkv``).
        variants: prefill and decode; one layout.
        device: where to keep it.
        reference: keep the dequantised fp32 weight and compute in fp32.
    """

    __slots__ = ("bias", "run", "weight")

    def __init__(
        self,
        weights: WeightSource,
        part: Part,
        name: str,
        variants: tuple[Variant, Variant],
        device: torch.device,
        *,
        reference: bool,
    ) -> None:
        kernels = [linear_kernel(variant, device.type) for variant in variants]
        packed = pack(kernels[0], weights, part, f"{name}.weight", device)
        dtype = torch.float32 if reference else torch.bfloat16
        self.bias: Tensor | None = None
        if f"{name}.bias" in weights.names(part):
            self.bias = keep(weights.tensor(part, f"{name}.bias"), device, dtype)
        self.weight: Packed | Tensor = kernels[0].dequantise(packed) if reference else packed
        self.run: tuple[RunLinear, RunLinear] = (
            (reference_run, reference_run) if reference else (kernels[0].run, kernels[1].run)  # type: ignore[assignment]  # `weight` is what each of the two takes
        )

    @property
    def bytes(self) -> int:
        """Memory of weight, scales and bias."""
        held = self.weight.bytes if isinstance(self.weight, Packed) else nbytes(self.weight)
        return held + nbytes(self.bias)


class Norm:
    """Weight and bias of a norm over the last dimension."""

    __slots__ = ("bias", "eps", "run", "weight")

    def __init__(
        self,
        weights: WeightSource,
        part: Part,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        variant: Variant,
    ) -> None:
        self.weight = keep(weights.tensor(part, f"{name}.weight"), device, dtype)
        self.bias: Tensor | None = None
        if f"{name}.bias" in weights.names(part):
            self.bias = keep(weights.tensor(part, f"{name}.bias"), device, dtype)
        self.eps = weights.model.norm_eps
        self.run = function("norm", variant)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise ``x`` over its last dimension."""
        out: Tensor = self.run(x, self.weight, self.bias, self.eps)
        return out

    @property
    def bytes(self) -> int:
        """Memory of weight and bias."""
        return nbytes(self.weight) + nbytes(self.bias)


class DecoderLayer:
    """A decoder layer, loaded.

    Args:
        model: the model.
        index: which layer.
        weights: read tensor by tensor, so that the host holds one linear beside the packed ones.
        linears: variants of the linears for prefill and decode.
        attention: variants of the attention for prefill and decode.
        device: where to keep and compute.
        reference: fp32 on the dequantised weights.

    Attributes:
        parallel: `feed` takes the layer's input, and not what `add_attended` returns.
    """

    def __init__(
        self,
        model: Model,
        index: int,
        weights: WeightSource,
        linears: tuple[Variant, Variant],
        attention: tuple[Variant, Variant],
        device: torch.device,
        *,
        reference: bool,
    ) -> None:
        dtype = torch.float32 if reference else torch.bfloat16
        norm, where = fixed_variant(model, "norm"), (device, dtype)
        self._norm1, self._norm2, self._attended_norm, self._fed_norm = (
            Norm(weights, index, name, *where, norm) if there else None
            for name, there in (
                ("norm1", model.norms_before), ("norm2", model.norms_before),
                ("attended_norm", model.norms_behind), ("fed_norm", model.norms_behind),
            )
        )  # fmt: skip
        self._head_norms: tuple[Norm, Norm] | None = None
        if model.qk_norm:
            self._head_norms = (
                Norm(weights, index, "q_norm", *where, HEAD_NORM),
                Norm(weights, index, "k_norm", *where, HEAD_NORM),
            )
        self.parallel = model.parallel
        self._whole_norm = model.qk_norm_whole
        self._projections = self._load_attention(
            model, index, weights, linears, device, reference=reference
        )
        self._activate = function("activation", fixed_variant(model, "activation"))
        self._mlp = self._load_mlp(model, index, weights, linears, device, reference=reference)
        self._sinks: Tensor | None = None
        if model.sinks:
            self._sinks = keep(weights.tensor(index, "sinks.weight"), device, torch.float32)
        self._cap = model.score_cap
        self._attend = tuple(self._attention_of(v) for v in attention)
        window = window_of(model, index)
        # Only plain attention takes requests of unequal lengths in one call.
        self._masks = window is None and self._sinks is None and self._cap is None
        if window is not None:
            self._attend = tuple(within_window(attend, window) for attend in self._attend)
        self._rope = function("rope", fixed_variant(model, "rope"))
        self._rotates, self._turn = model.position == "rope", model.rotary.kind_of(index)
        self._write = function("cache_write", cache_write_variant(model, attention[0]))
        self._gated = model.gated
        self._add = function("add", fixed_variant(model, "add"))
        self._heads, self._kv_heads, self._head_dim = model.heads, model.kv_heads, model.head_dim
        self._inner = model.heads * model.head_dim

    def _load_attention(
        self, model: Model, index: int, weights: WeightSource, linears: tuple[Variant, Variant],
        device: torch.device, *, reference: bool,
    ) -> tuple[Linear, ...]:  # fmt: skip
        """The linears of the attention, as `attend` uses them."""
        return tuple(
            Linear(weights, index, name, linears, device, reference=reference)
            for name in ("qkv", "out")
        )

    def _attention_of(self, variant: Variant) -> Callable[..., Tensor]:
        """What `attend` computes attention by, for a variant."""
        if self._sinks is not None:
            return functools.partial(function("sink_attention", variant), sinks=self._sinks)
        if self._cap is not None:
            return functools.partial(function("capped_attention", variant), cap=self._cap)
        return function("attention", variant)

    def _load_mlp(
        self, model: Model, index: int, weights: WeightSource, linears: tuple[Variant, Variant],
        device: torch.device, *, reference: bool,
    ) -> tuple[Linear, ...]:  # fmt: skip
        """The linears of the MLP, as `feed` uses them."""
        return tuple(
            Linear(weights, index, name, linears, device, reference=reference)
            for name in ("up", "down")
        )

    @property
    def recordable(self) -> bool:
        """Whether a pass on a GPU needs nothing of the host: whether a CUDA graph can hold it."""
        return True

    def __call__(self, x: Tensor, now: Pass, cache_k: Cache, cache_v: Cache) -> Tensor:
        """Take ``x[rows, hidden]`` through the layer.

        Args:
            x: residual stream, contiguous.
            now: the pass.
            cache_k: ``[B, G, L, D]``, written at the pass's positions and read.
            cache_v: likewise.

        Returns:
            The residual stream behind the layer, ``[rows, hidden]``, a new tensor.
        """
        attended = self.add_attended(x, self.attend(x, now, cache_k, cache_v))
        return self.add_fed(attended, self.feed(x if self.parallel else attended, now))

    def attend(self, x: Tensor, now: Pass, cache_k: Cache, cache_v: Cache) -> Tensor:
        """What `add_attended` adds to the residual stream ``x``; of a shard its part of the sum."""
        phase, batch, tokens, position, keys, turns, unequal = now
        heads, kv_heads = self._heads, self._kv_heads
        linear, out = self._projections
        fused = linear.run[phase](normed(self._norm1, x), linear.weight, linear.bias)
        fused = fused.view(batch, tokens, heads + 2 * kv_heads, self._head_dim)
        if self._head_norms is None and self._rotates:
            # Queries and keys lie side by side: one rotation takes both.
            turned = self._rope(fused.narrow(2, 0, heads + kv_heads), *turns[self._turn])
            q, k = turned.split_with_sizes((heads, kv_heads), 2)
            v = fused.narrow(2, heads + kv_heads, kv_heads)
        else:
            q, k, v = fused.split_with_sizes((heads, kv_heads, kv_heads), 2)
            if self._head_norms is not None and self._whole_norm:
                q = self._head_norms[0](q.flatten(2)).view(q.shape)
                k = self._head_norms[1](k.flatten(2)).view(k.shape)
            elif self._head_norms is not None:
                q, k = self._head_norms[0](q), self._head_norms[1](k)
            if self._rotates:
                cos, sin = turns[self._turn]
                q, k = self._rope(q, cos, sin), self._rope(k, cos, sin)
        if unequal is not None and unequal.seen is not None:
            attended = self._attend_unequal(q, k, v, cache_k, cache_v, keys, unequal)
        else:
            self._write(cache_k, cache_v, k, v, position)
            attended = self._attend[phase](q, cache_k, cache_v, keys)
        attended = attended.reshape(-1, self._inner)
        return out.run[phase](attended, out.weight, out.bias)

    def _attend_unequal(
        self, q: Tensor, k: Tensor, v: Tensor, cache_k: Cache, cache_v: Cache, keys: int,
        unequal: Unequal,
    ) -> Tensor:  # fmt: skip
        """Attention of one new token of each request, ``[B, 1, H, D]``."""
        attend = self._attend[DECODE]
        if self._masks and isinstance(cache_k, Tensor):
            self._write(cache_k, cache_v, k, v, unequal.last)
            return attend(q, cache_k, cache_v, keys, seen=unequal.seen)
        made = []
        for row, position in enumerate(unequal.each):
            one = slice(row, row + 1)
            self._write(cache_k[one], cache_v[one], k[one], v[one], position)
            made.append(attend(q[one], cache_k[one], cache_v[one], position + 1))
        return torch.cat(made)

    def feed(self, x: Tensor, now: Pass) -> Tensor:
        """What `add_fed` adds to the residual stream ``x``; of a shard its part of the sum."""
        linear, down = self._mlp
        wide = linear.run[now.phase](normed(self._norm2, x), linear.weight, linear.bias)
        if self._gated:
            gate, up = wide.chunk(2, 1)
            wide = self._activate(gate, up)
        else:
            wide = self._activate(wide)
        return down.run[now.phase](wide, down.weight, down.bias)

    def add_attended(self, x: Tensor, part: Tensor) -> Tensor:
        """The residual stream ``x`` with what the attention, of all shards, adds to it."""
        part = normed(self._attended_norm, part)
        out: Tensor = self._add(x, part)
        return out

    def add_fed(self, x: Tensor, part: Tensor) -> Tensor:
        """The residual stream ``x`` with what the MLP, of all shards, adds to it."""
        part = normed(self._fed_norm, part)
        out: Tensor = self._add(x, part)
        return out

    @property
    def bytes(self) -> int:
        """Memory of all weights, scales, biases and norms."""
        norms = (self._norm1, self._norm2, self._attended_norm, self._fed_norm)
        parts: Sequence[Linear | Norm | None] = (
            *norms, *self._projections, *self._mlp, *(self._head_norms or ()),
        )  # fmt: skip
        return nbytes(self._sinks) + sum(part.bytes for part in parts if part is not None)


def normed(norm: Norm | None, x: Tensor) -> Tensor:
    """``x`` behind a norm, or as it is where there is none."""
    return x if norm is None else norm(x)


def pack(
    kernel: LinearKernel, weights: WeightSource, part: Part, name: str, device: torch.device
) -> Packed:
    """Pack a weight ``[N, K]`` of any float dtype in slices of rows.

    Quantising takes six times an fp32 weight for a moment: in one piece, the widest linear of a
    70-billion-parameter model would need 11 GiB beside a stage that was planned to fill its device.
    Rows are quantised one by one, so that slices give the same bytes.

    Returns:
        The packed weight on ``device``.
    """
    total, columns = weights.shape(part, name)
    whole: dict[str, Tensor] = {}
    filled = 0
    for piece in weights.slices(part, name, slice_rows(columns, device.type)):
        packed = kernel.pack(piece.to(device, torch.float32))
        for role, tensor in packed.tensors.items():
            dimension = _ROW_DIMENSION.get(role, 0)
            each = tensor.shape[dimension] / piece.shape[0]
            if role not in whole:
                shape = list(tensor.shape)
                shape[dimension] = round(each * total)
                whole[role] = tensor.new_empty(shape)
            begin, length = round(each * filled), tensor.shape[dimension]
            whole[role].narrow(dimension, begin, length).copy_(tensor)
        filled += piece.shape[0]
    return Packed(kernel.layout, total, columns, whole)


def keep_table(
    weights: WeightSource, part: Part, name: str, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """A table ``[rows, columns]`` copied slice by slice, sharing no memory with any file."""
    shape = weights.shape(part, name)
    table = torch.empty(shape, dtype=dtype, device=device)
    filled = 0
    for piece in weights.slices(part, name, slice_rows(shape[1], device.type)):
        table[filled : filled + piece.shape[0]].copy_(piece)
        filled += piece.shape[0]
    return table


def keep(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A copy that shares no memory with the checkpoint's file."""
    return tensor.to(device, dtype, copy=True).contiguous()


def nbytes(tensor: Cache | None) -> int:
    """Bytes of a tensor's elements, 0 of none."""
    if isinstance(tensor, QuantisedCache):
        return tensor.bytes
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def reference_run(x: Tensor, weight: Packed | Tensor, bias: Tensor | None) -> Tensor:
    """A linear of a reference run, in fp32 on a plain weight."""
    assert isinstance(weight, Tensor)
    return reference_linear(x, weight, bias)
