"""What attention within a sliding window holds, piece by piece as the runtime computes it."""

from __future__ import annotations

from collections.abc import Callable

from foreplan.datasets.models.attention_window import Span, distinct_kinds, spans
from foreplan.datasets.models.model import Model
from foreplan.planner.serving.pricing import MicroBatches
from foreplan.planner.serving.scored_workspace import scored_bytes
from foreplan.planner.serving.spec import ServingWorkload


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


def heap_of_calls(model: Model, workload: ServingWorkload, sizes: MicroBatches) -> int:
    """What calls of a pass's attention add on a processor, masks of windows and scores, at most.

    Args:
        model: the model.
        workload: lengths.
        sizes: of the micro-batches.
    """
    prompt, tokens = workload.prompt_tokens, workload.prompt_tokens + workload.new_tokens

    def most(batch: int, queries: int, keys: int) -> int:
        def call(queries: int, keys: int) -> int:
            return scored_bytes(model, "cpu", 4, batch, queries, keys)

        return max(
            window_bytes(model, batch, queries, keys, of.window, call)
            for of in distinct_kinds(model, tokens)
        )

    return max(most(sizes.prefill, prompt, prompt), most(sizes.decode, 1, tokens))


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
