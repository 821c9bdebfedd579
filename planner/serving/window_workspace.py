"""What attention within a sliding window holds, piece by piece as the runtime computes it."""

from __future__ import annotations

from collections.abc import Callable

from foreplan.datasets.models.attention_window import Span, distinct_kinds, spans
from foreplan.datasets.models.model import Model


def window_bytes(
    model: Model, batch: int, queries: int, keys: int, window: int | None,
    call_bytes: Callable[[int, int], int],
) -> int:  # fmt: skip
    """Most that a layer's attention holds: its fullest call, and the output that they all fill.

    Args:
        model: the model.
        batch: sequences of the pass.
        queries: new tokens of each.
        keys: positions of the cache behind the pass.
        window: keys that a query sees at most; ``None`` = all.
        call_bytes: what a call of so many queries and keys holds without a band.
    """
    pieces = spans(queries, keys, window)
    whole = 2 * batch * queries * model.heads * model.head_dim if len(pieces) > 1 else 0
    return whole + max(
        call_bytes(span.queries, span.keys) + _band_bytes(model, batch, span) for span in pieces
    )


def prompt_window_bytes(model: Model, batch: int, prompt: int, tokens: int) -> int:
    """What windows add to a prompt's attention in layers of any kind; 0 where none slides.

    Args:
        model: the model.
        batch: prompts of a pass.
        prompt: tokens of each.
        tokens: of a prompt and its answer.
    """
    return max(
        window_bytes(model, batch, prompt, prompt, of.window, lambda *_: 0)
        for of in distinct_kinds(model, tokens)
    )


def _band_bytes(model: Model, batch: int, span: Span) -> int:
    """Masks of a call under a band, and its queries and results laid out by head; else 0.

    A byte a pair of query and key, again for each head that shares the key, and there in fp32 too,
    which a kernel adds to scores.
    """
    if not span.banded:
        return 0
    pairs, shared = span.queries * span.keys, model.heads // model.kv_heads
    laid_out = 2 * batch * span.queries * model.heads * model.head_dim
    return pairs * (1 + 5 * shared) + 2 * laid_out
