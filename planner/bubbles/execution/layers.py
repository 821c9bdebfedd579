"""Transformer layers that are trained: attention and MLP halves with the norm in front.

Built on the ``meta`` device, where nothing is allocated; `FlatParameters` gives them memory.

A gated layer is built as LLaMA's (RMS norm, SiLU gate, rotary positions, no biases), one without a
gate as GPT's and ViT's (layer norm, GELU, positions learned in front of the first, biases).

Shape legend: B = sequences, T = positions, C = features of the residual stream, H = heads, G =
key/value heads, D = features of a head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foreplan.errors import SpecError
from foreplan.planner.bubbles.execution.lanes import Lanes, Shard
from foreplan.planner.bubbles.towers import Tower

META = torch.device("meta")
_NORM_EPS = 1e-5
_ROTARY_BASE = 10000.0


class WeightGradients:
    """Weight gradients put off from a backward pass to a pass of their own.

    The two halves of a backward pass that zero-bubble schedules tell apart (Qi et al. 2023, section
    2): ``I`` computes what the stage before waits for, ``W`` the rest.
    """

    def __init__(self) -> None:
        self._open: list[Callable[[], None]] | None = None
        self._waiting: dict[int, list[Callable[[], None]]] = {}

    def collect(self, microbatch: int) -> None:
        """Put off what follows, until `close`."""
        self._open = self._waiting[microbatch] = []

    def close(self) -> None:
        """From here on gradients are computed at once."""
        self._open = None

    def add(self, compute: Callable[[], None]) -> bool:
        """Take ``compute`` if gradients are put off now."""
        if self._open is None:
            return False
        self._open.append(compute)
        return True

    def finish(self, microbatch: int) -> None:
        """Compute what was put off for a micro-batch."""
        for compute in self._waiting.pop(microbatch):
            compute()

    def forget(self) -> None:
        """Drop everything."""
        self._open = None
        self._waiting.clear()


class _Product(torch.autograd.Function):
    """A linear whose weight gradient can be put off, or is added to a sum of another dtype."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, total: Tensor | None,
        later: WeightGradients | None,
    ) -> Tensor:  # fmt: skip
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        x, ctx.weight, ctx.bias, ctx.total, ctx.later = inputs
        # The weight itself is kept, not saved, because its gradient is added to it later.
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        weight, total, rows = ctx.weight, ctx.total, gradient.flatten(0, -2)

        def add() -> None:
            _add_gradient(weight, total, rows.t(), x.flatten(0, -2))

        dx = gradient @ weight if ctx.needs_input_grad[0] else None
        db = None if ctx.bias is None else rows.sum(0)
        dw = None
        if ctx.later is None or not ctx.later.add(add):
            if total is None:
                dw = rows.t() @ x.flatten(0, -2)
            else:
                add()
        return dx, dw, db, None, None


def _add_gradient(weight: Tensor, total: Tensor | None, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to ``total``, or as autograd would, hooks included.

    A GPU multiplies to fp32 what is to be added in fp32: sums of unlike dtypes take 1.4-1.5 times
    as long as those of fp32 alone, 0.14 ms of the 0.39 that half a layer of width 2048 took for its
    backward pass (measured, H200).
    """
    with torch.no_grad():  # a pass that was put off runs outside of a backward pass
        if total is None or not left.is_cuda:
            product = left @ right
        else:
            product = torch.mm(left, right, out_dtype=total.dtype)
        if total is not None:
            total.add_(product)
            return
    torch.autograd.backward([weight], [product])


class Linear(nn.Module):
    """``[..., inputs] -> [..., outputs]``; weight ``[outputs, inputs]``.

    Args:
        inputs, outputs: features.
        bias: whether to add one.
        lanes: that share it.
        shard: this lane's part of its outputs (dimension 0) or inputs (dimension 1: what the lanes
            compute is summed).

    Attributes:
        later: where the weight's gradients are put off to, if they are.
        total: what they are added to where that has another dtype than the weight.
    """

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool, lanes: Lanes | None = None,
        shard: Shard | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._lanes = lanes if shard is not None and shard.dimension == 1 else None
        self.shard = shard
        if shard is not None:
            inputs, outputs = (shard.size, outputs) if shard.dimension else (inputs, shard.size)
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=META))
        self.bias = nn.Parameter(torch.empty(outputs, device=META)) if bias else None
        self.later: WeightGradients | None = None
        self.total: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        if self._lanes is None:
            return self._product(x, self.bias)
        return self.finish(self._lanes.leave(self.partial(x)))

    def partial(self, x: Tensor) -> Tensor:
        """This lane's share of the sum that `finish` takes."""
        return self._product(x, None)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.later is None and self.total is None:
            return F.linear(x, self.weight, bias)
        return _Product.apply(x, self.weight, bias, self.total, self.later)  # type: ignore[no-untyped-call,no-any-return]

    def finish(self, summed: Tensor) -> Tensor:
        """The output from the sum over lanes."""
        return summed if self.bias is None else summed + self.bias

    def shard_of(self, key: str) -> Shard | None:
        """This lane's part of a parameter, ``None`` for all of it."""
        cut = self.shard is not None and (key == "weight" or self.shard.dimension == 0)
        return self.shard if cut else None


def norm(tower: Tower) -> nn.Module:
    """The norm of a kind of layers."""
    if tower.gated:
        return nn.RMSNorm(tower.hidden, eps=_NORM_EPS, device=META)
    return nn.LayerNorm(tower.hidden, eps=_NORM_EPS, device=META)


class Rotation:
    """Rotary positions, halves of D as pairs (Su et al. 2021, in LLaMA's form).

    The tables are made once and shared by all layers of a stage.
    """

    def __init__(self) -> None:
        self._cos = self._sin = torch.empty(0, 0)

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate ``x[B, H, T, D]``."""
        length, width = x.shape[-2], x.shape[-1] // 2
        if self._cos.shape != (length, width):
            steps = torch.arange(width, device=x.device, dtype=torch.float32) / width
            positions = torch.arange(length, device=x.device, dtype=torch.float32)
            angles = positions[:, None] * _ROTARY_BASE**-steps
            self._cos, self._sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        cos, sin = self._cos, self._sin
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class AttentionHalf(nn.Module):
    """Norm, attention and residual: ``[B, T, C] -> [B, T, C]``."""

    def __init__(self, tower: Tower, rotation: Rotation, lanes: Lanes) -> None:
        super().__init__()
        inner, bias = tower.heads * tower.head_dim, not tower.gated
        shared = tower.kv_heads * tower.head_dim
        if tower.kv_heads % lanes.size:
            raise SpecError("tp", got=lanes.size, expected=f"a divisor of {tower.kv_heads} heads")
        self._tower, self._lanes = tower, lanes
        self._widths = tuple(width // lanes.size for width in (inner, shared, shared))
        self._rotation = rotation
        self.norm = norm(tower)
        self.qkv = Linear(
            tower.hidden, inner + 2 * shared, bias=bias, shard=lanes.cut(0, inner, shared, shared)
        )
        self.out = Linear(inner, tower.hidden, bias=bias, lanes=lanes, shard=lanes.cut(1, inner))

    def forward(self, x: Tensor) -> Tensor:
        """Attend within each sequence."""
        return x + self.out(self.inside(self._lanes.enter(self.norm(x))))  # type: ignore[no-any-return]

    def inside(self, normed: Tensor) -> Tensor:
        """From the normed input to what ``out`` takes."""
        tower = self._tower
        q, k, v = (
            part.unflatten(-1, (-1, tower.head_dim)).transpose(1, 2)
            for part in self.qkv(normed).split(self._widths, -1)
        )
        if tower.gated:
            q, k = self._rotation(q), self._rotation(k)
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=tower.causal, enable_gqa=tower.kv_heads != tower.heads
        )
        return mixed.transpose(1, 2).flatten(2)


class MlpHalf(nn.Module):
    """Norm, MLP and residual: ``[B, T, C] -> [B, T, C]``."""

    def __init__(self, tower: Tower, lanes: Lanes) -> None:
        super().__init__()
        self._gated, self._lanes = tower.gated, lanes
        self.norm = norm(tower)
        blocks = (tower.ffn,) * (2 if tower.gated else 1)
        bias = not tower.gated
        self.up = Linear(tower.hidden, sum(blocks), bias=bias, shard=lanes.cut(0, *blocks))
        self.down = Linear(
            tower.ffn, tower.hidden, bias=bias, lanes=lanes, shard=lanes.cut(1, tower.ffn)
        )

    @property
    def out(self) -> Linear:
        """What brings the inside back to the residual stream."""
        return self.down

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position."""
        return x + self.down(self.inside(self._lanes.enter(self.norm(x))))  # type: ignore[no-any-return]

    def inside(self, normed: Tensor) -> Tensor:
        """From the normed input to what ``down`` takes."""
        wide: Tensor = self.up(normed)
        if self._gated:
            gate, up = wide.chunk(2, -1)
            return F.silu(gate) * up
        return F.gelu(wide)


Half = AttentionHalf | MlpHalf


def half(tower: Tower, index: int, rotation: Rotation, lanes: Lanes) -> Half:
    """Half ``2 l`` is the attention of layer ``l``, half ``2 l + 1`` its MLP."""
    return MlpHalf(tower, lanes) if index % 2 else AttentionHalf(tower, rotation, lanes)
