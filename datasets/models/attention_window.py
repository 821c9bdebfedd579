"""`spans`: how attention within a sliding window is computed, piece by piece.

Query ``i`` of a layer with a window of ``W`` keys sees keys ``max(0, i - W + 1)`` to ``i``
(transformers, ``masking_utils.sliding_window_overlay``). The runtime computes such a layer in
pieces (`spans`), each one call of the attention that layers without a window have: the first ``W``
positions under their causal mask, later ones in blocks of `BLOCK` queries with the keys that any of
them sees, under a band; a single query, with its ``W`` keys, needs no mask. So a window is priced
by programs that layers without one have too. The cache keeps every token of every layer: a window
saves time and no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from foreplan.datasets.experts import LayerClass
from foreplan.datasets.models.model import Model
from foreplan.errors import SpecError

#: Queries of a block behind the window. ``measured`` (one core of an EPYC, torch 2.11, 8 over 2
#: heads of 64, a window of 512, bf16): 19, 26 and 40 us a query in blocks of 256, 512 and 1024,
#: whose keys grow with them; a GPU needs large ones.
BLOCK = 512


class Span(NamedTuple):
    """One call of the attention.

    Attributes:
        query: first of its queries, counted from the first of the pass.
        queries: how many.
        key: first of its keys, a position of the cache.
        keys: how many; the last query sees the last key.
        banded: its queries see different first keys, so that a mask must say which.
    """

    query: int
    queries: int
    key: int
    keys: int
    banded: bool


def spans(queries: int, keys: int, window: int | None) -> list[Span]:
    """The calls that compute the attention of a pass.

    Args:
        queries: new tokens of each sequence.
        keys: positions in the cache after the pass; the last query's is the last.
        window: keys that a query sees at most; ``None`` = all.
    """
    if window is None or keys <= window:
        return [Span(0, queries, 0, keys, banded=False)]
    first = keys - queries  # position of the first query
    found = []
    if first < window:
        found.append(Span(0, window - first, 0, window, banded=False))
    for begin in range(max(first, window), keys, BLOCK):
        stop = min(begin + BLOCK, keys)
        # One key more than the first query sees: kernels want rows of a mask aligned.
        key = begin - window + (1 if stop - begin == 1 else 0)
        found.append(Span(begin - first, stop - begin, key, stop - key, banded=stop - begin > 1))
    return found


def window_of(model: Model, layer: int) -> int | None:
    """Keys that a query of a layer sees at most; ``None`` = all."""
    slides = not model.window_layers or layer in model.window_layers
    return model.sliding_window if slides else None


def refuse_windows(model: Model, tokens: int, where: str, doing: str) -> None:
    """Raise where something lets every query see all keys, some of which a window hides.

    Args:
        model: the model.
        tokens: length of a sequence.
        where: field that says so.
        doing: what that is, in words.

    Raises:
        SpecError: the sequence is longer than the model's window.
    """
    if model.sliding_window is not None and tokens > model.sliding_window:
        raise SpecError(
            where, got=tokens,
            expected=f"at most the sliding window of {model.name}, {model.sliding_window}: {doing}",
        )  # fmt: skip


class LayerKind(NamedTuple):
    """What decides a layer's programs beside sizes that all layers of a model share.

    Attributes:
        mlp: what its MLP is.
        window: keys that a query sees at most; ``None`` = all.
    """

    mlp: LayerClass
    window: int | None = None


def layer_kinds(model: Model, tokens: int) -> tuple[LayerKind, ...]:
    """The kind of every layer in passes over sequences of at most so many tokens.

    A window that none of them is longer than is no window.
    """
    windows = (window_of(model, layer) for layer in range(model.layers))
    within = (w if w is not None and w < tokens else None for w in windows)
    return tuple(LayerKind(*each) for each in zip(model.layer_classes, within, strict=True))


def only_kind(kinds: Sequence[LayerKind]) -> LayerKind:
    """The kind of all layers.

    Raises:
        SpecError: they differ.
    """
    if len(set(kinds)) > 1:
        raise SpecError("layer kind", got=None, expected="one: the model has layers of several")
    return kinds[0]


def distinct_kinds(model: Model, tokens: int) -> list[LayerKind]:
    """Each of `layer_kinds` once, in a fixed order."""
    return sorted(set(layer_kinds(model, tokens)), key=lambda of: (of.mlp, of.window or 0))
