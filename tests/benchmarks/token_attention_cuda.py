"""How long attention of one new token takes on a GPU, in one launch and by torch's operators.

    python tests/benchmarks/token_attention_cuda.py

One JSON line a shape: median microseconds a call inside a CUDA graph, over caches that take turns
so that none of them is in L2. Needs a CUDA device.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foreplan.datasets.kernels import _scored_attention
from foreplan.datasets.kernels._token_attention import token_attention
from foreplan.datasets.kernels.quantised_cache import QuantisedCache
from foreplan.datasets.timing.graph_timer import graph_seconds

#: Heads, heads of keys, features: Llama 3.2 1b and 3.1 8b, Qwen3-MoE, Gemma 2 2b and 9b, OPT 6.7b,
#: gpt-oss, GLM-4.
HEADS = [
    (32, 8, 64), (32, 8, 128), (16, 2, 128), (8, 4, 256), (16, 8, 256), (32, 32, 128), (64, 8, 64),
    (32, 2, 128),
]  # fmt: skip
BATCHES = [(1, 288), (8, 288), (64, 288), (1, 4096), (8, 4096), (32, 2048), (1, 32768)]
CAP = 50.0
_APART = 150e6  # bytes of caches that take turns: more than L2


def main() -> None:
    """Print a line a shape."""
    for heads, groups, features in HEADS:
        for batch, keys in BATCHES:
            print(json.dumps(measured(batch, heads, groups, features, keys)), flush=True)


def measured(batch: int, heads: int, groups: int, features: int, keys: int) -> dict[str, Any]:
    """Microseconds a call, by what is called."""
    shape = (batch, groups, keys + 8, features)
    copies = max(2, min(64, round(_APART / (4 * batch * groups * keys * features))))
    plain = [[_cache(shape) for _ in "kv"] for _ in range(copies)]
    coded = [[QuantisedCache.of(x) for x in pair] for pair in plain]
    q = torch.randn(batch, 1, heads, features, dtype=torch.bfloat16, device="cuda")
    found: dict[str, Any] = {
        "batch": batch, "heads": heads, "groups": groups, "features": features, "keys": keys
    }  # fmt: skip
    found["torch"] = _us([partial(_plain, q, *pair, keys) for pair in plain])
    found["torch, capped"] = _us([partial(_capped, q, *pair, keys) for pair in plain])
    found["torch, 8 bits"] = _us([partial(_dequantised, q, *pair, keys) for pair in coded])
    found["one launch"] = _us([partial(token_attention, q, *pair, keys) for pair in plain])
    found["one launch, capped"] = _us(
        [partial(token_attention, q, *pair, keys, cap=CAP) for pair in plain]
    )
    found["one launch, 8 bits"] = _us([partial(token_attention, q, *pair, keys) for pair in coded])
    return found


def _plain(q: Tensor, k: Tensor, v: Tensor, keys: int) -> Tensor:
    groups, features = k.shape[1], k.shape[3]
    folded = q.view(q.shape[0], groups, -1, features)
    return F.scaled_dot_product_attention(folded, k[:, :, :keys], v[:, :, :keys])


def _capped(q: Tensor, k: Tensor, v: Tensor, keys: int) -> Tensor:
    k, v = k[:, :, :keys], v[:, :, :keys]
    return _scored_attention._by_products(q.transpose(1, 2), k, v, None, cap=CAP)


def _dequantised(q: Tensor, k: QuantisedCache, v: QuantisedCache, keys: int) -> Tensor:
    return _plain(q, k.read(keys, torch.bfloat16), v.read(keys, torch.bfloat16), keys)


def _cache(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def _us(calls: list[Any]) -> float:
    return round(1e6 * graph_seconds(calls, most_s=0.1) / len(calls), 2)


if __name__ == "__main__":
    main()
