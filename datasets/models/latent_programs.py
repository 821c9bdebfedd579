"""The tensor programs of an attention over latents, in the two ways that the runtime computes it.

Several new tokens (prefill) are expanded: from each latent every head's key and value are made, and
heads attend as any others do, with values padded to the width of keys::

    linear latents -> [norm of queries' latent] -> linear queries -> norm of latent -> rope queries
        -> rope key -> cache_write -> matmul expand -> expand_heads -> attention -> linear out

One new token (decode) is absorbed: what makes keys of latents goes to the query, what makes values
to the result, and all heads attend to the latents as they are cached (DeepSeek-V2, 2024, section
2.1.2)::

    ... -> cache_write -> matmul (a head's query to a latent's) -> latent_attention
        -> matmul (a latent to a head's value) -> linear out

The cache holds latent and turned key behind one another; they are written as a key and a value of
half their features each, which are as many bytes. The matrix of `LatentAttention.expanding` stays
in bf16: both ways read one copy of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from foreplan.datasets.models.latent import LatentAttention
from foreplan.datasets.models.model import Model
from foreplan.datasets.program import TRANSPOSED, Variant

#: Of several tokens every head's key and value; of one a head's query in the latent's features, and
#: a latent in the head's.
EXPAND, ABSORB, RESTORE = (
    Variant("bf16", "bf16", f"torch.{name}") for name in ("linear", "bmm", f"bmm{TRANSPOSED}")
)
EXPAND_HEADS = Variant("bf16", "bf16", "torch.expand_heads")


class Counts(Protocol):
    """What counts calls, see `layer_programs`."""

    def add(self, op: str, /, **dims: int) -> None:
        """Count a call whose variant is chosen elsewhere."""

    def add_as(self, op: str, variant: Variant, /, **dims: int) -> None:
        """Count a call of this variant."""


def attention_call(model: Model, batch: int, queries: int, keys: int) -> tuple[str, dict[str, int]]:
    """Which operator a pass's attention is, and its dimensions.

    Args:
        model: the model.
        batch: sequences.
        queries: new tokens of each.
        keys: positions that they see at most.
    """
    latent = model.latent
    seen = {"batch": batch, "queries": queries, "keys": keys, "heads": model.heads}
    if latent is None:
        op = "sink_attention" if model.sinks else "attention"
        if model.score_cap is not None:
            op = "capped_attention"
        return op, seen | {"kv_heads": model.kv_heads, "head_dim": model.head_dim}
    if queries > 1:
        return "attention", seen | {"kv_heads": model.heads, "head_dim": latent.width}
    del seen["queries"]
    return "latent_attention", seen | {"latent": latent.rank, "turned": latent.turned}


def count_before(run: Counts, model: Model, latent: LatentAttention, norm: Variant, rows: int,
                 linears: Mapping[str, Mapping[str, int]]) -> None:  # fmt: skip
    """Count what runs before the cache is written.

    Args:
        run: counts.
        model: the model.
        latent: its attention.
        norm: variant of the norms of latents.
        rows: tokens of the pass.
        linears: dimensions by name.
    """
    run.add("linear", rows=rows, **linears["latents"])
    if latent.query_rank is not None:
        run.add_as("norm", norm, rows=rows, cols=latent.query_rank)
    run.add("linear", rows=rows, **linears["queries"])
    run.add_as("norm", norm, rows=rows, cols=latent.rank)
    for heads in (model.heads, 1):
        run.add("rope", rows=rows, heads=heads, head_dim=latent.turned)


def count_attention(run: Counts, model: Model, latent: LatentAttention, attend: Variant,
                    seen: tuple[int, int, int]) -> None:  # fmt: skip
    """Count the attention over a cache that is written; arguments as of `count_before`.

    Args:
        run: counts.
        model: the model.
        latent: its attention.
        attend: variant of the operator that `attention_call` names.
        seen: batch, queries and keys of the pass.
    """
    (batch, queries, keys), heads = seen, model.heads
    op, dims = attention_call(model, *seen)
    if op == "attention":
        rows, (n, k) = batch * keys, latent.expanding(heads)
        run.add_as("matmul", EXPAND, batch=1, m=rows, n=n, k=k)
        run.add_as(
            "expand_heads", EXPAND_HEADS,
            rows=rows, heads=heads, plain=latent.plain, turned=latent.turned, value=latent.value,
        )  # fmt: skip
        run.add_as(op, attend, **dims)
        return
    run.add_as("matmul", ABSORB, batch=heads, m=batch * queries, n=latent.rank, k=latent.plain)
    run.add_as(op, attend, **dims)
    run.add_as("matmul", RESTORE, batch=heads, m=batch * queries, n=latent.value, k=latent.rank)
