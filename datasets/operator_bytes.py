"""Bytes that move for operators whose shape says more than one product; see `operators`.

Each takes an operator's dimensions by name, and where types matter its variant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from foreplan.datasets.dtypes import DTYPE_BYTES, cache_bytes, weight_bytes
from foreplan.datasets.experts import touched_experts

if TYPE_CHECKING:
    from foreplan.datasets.program import Variant


def visible_pairs(d: Mapping[str, int]) -> float:
    """Pairs of (query, key) that a causal mask leaves, the last query seeing every key."""
    q, keys = d["queries"], d["keys"]
    return q * keys - q * (q - 1) / 2


def conv_bytes(d: Mapping[str, int], v: Variant) -> float:
    """Images read and written, and filters."""
    pixels = d["batch"] * (d["cin"] * d["inputs"] + d["cout"] * d["outputs"])
    kernel = d["cin"] // d["groups"] * d["cout"] * d["taps"]
    return pixels * DTYPE_BYTES[v.compute] + kernel * DTYPE_BYTES[v.storage]


def activation_bytes(d: Mapping[str, int], v: Variant) -> float:
    """A gated activation reads two tensors and writes one."""
    return (2.0 + v.kernel.endswith("_mul")) * d["rows"] * d["cols"] * DTYPE_BYTES[v.compute]


def attention_bytes(d: Mapping[str, int], v: Variant) -> float:
    """Queries, results, and the cache as it is stored."""
    queries_and_out = 2 * d["queries"] * d["heads"] * d["head_dim"] * DTYPE_BYTES[v.compute]
    cache = 2 * d["keys"] * d["kv_heads"] * cache_bytes(d["head_dim"], v.storage)
    return d["batch"] * (queries_and_out + cache)


def expanded_bytes(d: Mapping[str, int], v: Variant) -> float:
    """A head's plain key and value, with the shared key behind the former; the turned queries."""
    read = d["heads"] * (d["plain"] + d["value"]) + d["turned"]
    written = 2 * d["heads"] * (d["plain"] + d["turned"])
    queries = 2 * d["heads"] * d["turned"]
    return 1.0 * d["rows"] * (read + written + queries) * DTYPE_BYTES[v.compute]


def latent_bytes(d: Mapping[str, int], v: Variant) -> float:
    """Queries and results, and the latents as they are stored."""
    queries_and_out = d["heads"] * (2 * d["latent"] + d["turned"]) * DTYPE_BYTES[v.compute]
    cache = d["keys"] * (d["latent"] + d["turned"]) * DTYPE_BYTES[v.storage]
    return 1.0 * d["batch"] * (queries_and_out + cache)


def expert_bytes(d: Mapping[str, int], v: Variant) -> float:
    """Weights of the experts that rows touch, and what both products and the activation move."""
    up = weight_bytes(2 * d["ffn"], d["hidden"], v.storage)
    down = weight_bytes(d["hidden"], d["ffn"], v.storage)
    moved = d["rows"] * d["active"] * (2 * d["hidden"] + 6 * d["ffn"]) * DTYPE_BYTES[v.compute]
    return touched_experts(d["rows"], d["experts"], d["active"]) * (up + down) + moved


def recurrent_weights(d: Mapping[str, int]) -> float:
    """Weights of all layers and directions, biases left out; a layer reads both directions."""
    width = d["gates"] * d["hidden"]
    sources = d["inputs"] + (d["layers"] - 1) * d["directions"] * d["outputs"]
    projected = d["hidden"] * d["outputs"] if d["outputs"] != d["hidden"] else 0
    each = d["layers"] * (width * d["outputs"] + projected)
    return float(d["directions"] * (width * sources + each))


def recurrent_bytes(d: Mapping[str, int], v: Variant) -> float:
    """Inputs and results of every step, and all weights once."""
    values = d["steps"] * d["rows"] * (d["inputs"] + d["directions"] * d["outputs"])
    return values * DTYPE_BYTES[v.compute] + recurrent_weights(d) * DTYPE_BYTES[v.storage]
