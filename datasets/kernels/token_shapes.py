"""`TokenShape`: how the kernel for one new token's attention cuts its keys, and what it takes.

The kernel (``_token_attention``) gives a block up to eight heads of a sequence that share keys.
Where these are too few for the GPU, keys are shared out among several blocks, whose results a
second kernel puts together. Here is what costs and ledgers know of it, without torch.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import NamedTuple

#: Compute capability from which on GPUs have its instructions (``theory``, PTX ISA 7.8:
#: ``movmatrix`` is of 7.5, ``mma`` of bf16 of 8.0).
CAPABILITY = 8.0
#: Features of a head come in such groups, up to so many.
_GROUP, _MOST_FEATURES = 32, 256
#: Heads of a block, and parts of a sequence at most.
HEADS, MOST_PARTS = 8, 256
#: Fewest keys of a part (``measured`` on an H200, 56 shapes: parts of 128 and 64 keys take 1.03 to
#: 1.06 times as long in the mean; docs/results/kernels.md).
_LEAST_KEYS = 256
#: Blocks of eight warps that a whole H200 holds, for which keys are cut: two on each of its 132
#: multiprocessors, one where a head's features are so many that their sums leave no registers for a
#: second.
_UNITS, _HELD, _WIDE, _HELD_WIDE = 132, 2, 128, 1
#: Keys that a warp takes in a step; warps of a block, and where many blocks have few keys each,
#: whose warps would have nothing to do (``measured``, as above: 0.75-0.87 of the time).
STEP_KEYS, _WARPS, _FEW_WARPS, _FEW_KEYS = 16, 8, 4, 512


def attends_at_once(
    queries: int, features: int, compute: str, compute_capability: str | None
) -> bool:
    """Whether a GPU's attention is that kernel.

    Args:
        queries: new tokens of a sequence.
        features: of a head.
        compute: dtype.
        compute_capability: of the GPU, ``None`` = unknown.
    """
    if queries != 1 or compute != "bf16" or features % _GROUP or features > _MOST_FEATURES:
        return False
    return takes_rows(compute_capability)


def takes_rows(compute_capability: str | None) -> bool:
    """Whether a GPU runs maps of rows in one launch each (``_row_maps``).

    Args:
        compute_capability: of the GPU, ``None`` = unknown; AMD's is a name, as ``gfx942``.
    """
    known = compute_capability is not None and compute_capability[:1].isdigit()
    return known and float(compute_capability or 0) >= CAPABILITY


class TokenShape(NamedTuple):
    """How keys are cut.

    Attributes:
        blocks: of uncut keys, one a sequence and eight heads that share keys.
        parts: of a sequence's keys.
        warps: of a block.
    """

    blocks: int
    parts: int
    warps: int


def token_shape(batch: int, heads: int, kv_heads: int, features: int, keys: int) -> TokenShape:
    """The same whatever the GPU, so that results agree.

    Args:
        batch: sequences.
        heads: of queries.
        kv_heads: of keys.
        features: of a head.
        keys: of a sequence.
    """
    blocks = batch * kv_heads * -(-(heads // kv_heads) // HEADS)
    held = _UNITS * _held(features)
    parts = max(1, min(held // blocks, keys // _LEAST_KEYS, MOST_PARTS))
    few = blocks * parts > held and keys <= parts * _FEW_KEYS
    return TokenShape(blocks, parts, _FEW_WARPS if few else _WARPS)


def token_sums_bytes(batch: int, heads: int, kv_heads: int, features: int, keys: int) -> int:
    """What parts of keys leave for each other, fp32; 0 of keys that are not cut."""
    parts = token_shape(batch, heads, kv_heads, features, keys).parts
    return 4 * parts * batch * heads * (features + 2) if parts > 1 else 0


def _held(features: int) -> int:
    return _HELD if features <= _WIDE else _HELD_WIDE


class _Seconds(NamedTuple):
    """By bits of the cache: a warp's step, and of it a feature; a step of a multiprocessor."""

    step: float
    feature: float
    unit_step: float


#: ``fitted``: 162 times on a whole H200, 56 shapes of 1-64 sequences and 288-32768 keys, within a
#: factor of 1.06 in the mean and 1.23 at most (tests/benchmarks/token_attention_cuda.py).
_FITTED = MappingProxyType({
    16: _Seconds(0.674e-6, 2.11e-9, 0.0),
    8: _Seconds(0.050e-6, 4.96e-9, 0.054e-6),
})  # fmt: skip
#: A call, and of it a feature; putting parts together, and of it each; how soon bounds add up.
_CALL_S, _CALL_FEATURE_S, _PARTS_S, _PART_S, _POWER = 2.98e-6, 12.2e-9, 1.54e-6, 0.124e-6, 1.455


def token_seconds(
    batch: int, heads: int, kv_heads: int, features: int, keys: int, *,
    bits: int, units: int, bandwidth: float,
) -> float:  # fmt: skip
    """Seconds of the kernel on multiprocessors of an H200.

    Args:
        batch: sequences.
        heads: of queries.
        kv_heads: of keys.
        features: of a head.
        keys: of a sequence.
        bits: of the cache.
        units: multiprocessors of the GPU or its slice.
        bandwidth: bytes a second of memory.
    """
    shape, took = token_shape(batch, heads, kv_heads, features, keys), _FITTED[bits]
    steps = math.ceil(math.ceil(keys / shape.parts) / STEP_KEYS)
    blocks, held = shape.blocks * shape.parts, units * _held(features) * _WARPS // shape.warps
    turns = math.ceil(blocks / held) * math.ceil(steps / shape.warps)
    bounds = (
        turns * (took.step + took.feature * features),
        math.ceil(blocks / units) * steps * took.unit_step,
        2 * batch * kv_heads * keys * (features * bits / 8 + (2 if bits == 8 else 0)) / bandwidth,
    )
    together = _PARTS_S + _PART_S * shape.parts if shape.parts > 1 else 0.0
    added = math.pow(sum(math.pow(bound, _POWER) for bound in bounds), 1 / _POWER)
    return _CALL_S + _CALL_FEATURE_S * features + together + added
