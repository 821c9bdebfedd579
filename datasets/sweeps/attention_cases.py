"""Attention of the sweep inside CUDA graphs: plain, causal, or with something added to scores.

What is added (a bias that was learned, as T5's and Swin's; a mask of zeros and minus infinity)
decides which kernel torch takes: one value for every pair of a query and a key, or one row for all
queries; its own for every head, sequence, both or neither; with keys or with heads as neighbours in
memory; learned, given, or of truth values.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from foreplan.datasets.sweeps.operator_case import (
    MOST_BYTES,
    Calls,
    Case,
    Operands,
    gradient_call,
    most_flops,
    width_of,
)

#: Before the name of an operator: something is added to its scores.
MASKED = "masked_"


#: Of the operators so named, in how many nothing is: FP32, and windows in large batches.
_PLAIN = 0.12
#: What operator tables say of what is added.
_MASK_DIMS = ("masks", "strided", "training", "converts", "broadcast")


class _Mask(NamedTuple):
    """What is added to the scores of each sequence and head."""

    shape: tuple[int, int, int, int]
    across: bool
    learned: bool
    boolean: bool

    def made(self, view: Operands, dtype: str, offset: int) -> Any:
        """The tensor, of this shape."""
        b, heads, queries, keys = self.shape
        if self.across:  # as a table of all heads' biases is looked up
            found = view(dtype, offset, b, queries, keys, heads).permute(0, 3, 1, 2)
        else:
            found = view(dtype, offset, b, heads, queries, keys)
        return found > 1.0 if self.boolean else found

    def dims(self, queries: int) -> dict[str, int]:
        """What an operator table says of it."""
        b, heads, rows, _ = self.shape
        said = (b * heads, self.across, self.learned, self.boolean, rows < queries)
        return {name: int(value) for name, value in zip(_MASK_DIMS, said, strict=True)}


def attention(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """An attention, its gradient or that of one new token (``generation``), as ``op`` says."""
    name = op.removeprefix(MASKED)
    masked, back = name != op, name == "attention_gradient"
    dtype = "bfloat16" if dtype == "fp32" and not masked else dtype
    while True:
        b, heads = int(2.0 ** rng.uniform(0, 11 if masked else 7)), int(2.0 ** rng.uniform(0, 6.5))
        head_dim = int(rng.choice([32, 64, 80, 96, 128], p=[0.1, 0.4, 0.1, 0.1, 0.3]))
        # Heads that share keys and values.
        shared = rng.random() < (0.1 if masked else 0.5)
        group = math.gcd(heads, 2 ** int(rng.integers(1, 5))) if shared else 1
        queries = 1 if name == "generation" else int(2.0 ** rng.uniform(2, 12.5))
        if masked and queries > 16 and rng.random() < 0.5:
            queries -= queries % 8
        causal = not masked and queries > 1 and bool(rng.random() < 0.5)
        keys = queries if causal or rng.random() < 0.7 else int(2.0 ** rng.uniform(4, 13))
        if queries == 1:
            keys = int(2.0 ** rng.uniform(4, 14))
        kv_heads = heads // group
        nothing = not masked or rng.random() < _PLAIN
        mask = None if nothing else _mask(rng, b, heads, queries, keys)
        added = math.prod(mask.shape) if mask else 0
        # A gradient by what is added is made for every sequence and head before it is summed up.
        if mask and mask.learned:
            added += b * heads * queries * keys
        moved = width_of(dtype) * (2.0 * b * heads * (queries + keys) * head_dim + added)
        flops = 4.0 * b * heads * queries * keys * head_dim
        if moved < MOST_BYTES * scale / 2 and flops < most_flops(dtype, scale) / 2:
            break

    def calls(view: Operands) -> Calls:
        import torch
        import torch.nn.functional as F

        # As linears leave them: heads of one token lie together.
        q = view(dtype, 0, b, queries, heads, head_dim).transpose(1, 2)
        behind, room = q.numel() + 256, b * keys * kv_heads * head_dim + 256
        k, v = (
            view(dtype, behind + at * room, b, keys, kv_heads, head_dim).transpose(1, 2)
            for at in range(2)
        )
        call = partial(
            F.scaled_dot_product_attention, is_causal=causal, enable_gqa=kv_heads < heads
        )
        if mask is None:
            return [gradient_call(call, [q, k, v]) if back else partial(call, q, k, v)]
        bias = mask.made(view, dtype, behind + 2 * room)
        if not mask.learned:
            given = partial(call, attn_mask=bias)
            return [gradient_call(given, [q, k, v]) if back else partial(given, q, k, v)]
        if back:
            return [gradient_call(call, [q, k, v, bias])]
        leaf = bias.detach().requires_grad_()
        return [torch.enable_grad()(partial(call, q, k, v, leaf))]

    # Tables count causal pairs; so many keys leave as many pairs as no mask does.
    more = 0 if causal or queries == 1 else (queries - 1) // 2
    dims = {"b": b, "queries": queries, "keys": keys + more, "heads": heads, "kv_heads": kv_heads,
            "head_dim": head_dim, "window": 0}  # fmt: skip
    dims |= mask.dims(queries) if mask else dict.fromkeys(_MASK_DIMS, 0)
    kind = "generation_attention" if queries == 1 else "context_attention" + back * "_gradient"
    return Case(kind, kind, f"{dtype}/{dtype}", dims, calls)


def _mask(rng: np.random.Generator, b: int, heads: int, queries: int, keys: int) -> _Mask:
    own_batch, own_heads = rng.random(2) < (0.35, 0.6)
    boolean = bool(rng.random() < 0.2)
    learned = not boolean and bool(rng.random() < 0.5)
    own_heads = bool(own_heads) and heads > 1
    across = own_heads and not boolean and bool(rng.random() < 0.3)
    row = not learned and not across and bool(rng.random() < 0.2)
    shape = (b if own_batch else 1, heads if own_heads else 1, 1 if row else queries, keys)
    return _Mask(shape, across, learned, boolean)
