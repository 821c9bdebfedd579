"""Pieces of attention within a window: every query sees its keys, once, and no piece more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.datasets.models.attention_window import (
    BLOCK,
    LayerKind,
    distinct_kinds,
    layer_kinds,
    only_kind,
    spans,
)
from foreplan.datasets.models.load_model import load_model
from foreplan.errors import SpecError


@given(
    keys=st.integers(1, 4000),
    share=st.floats(0, 1),
    window=st.one_of(st.none(), st.integers(1, 4000)),
)
def test_pieces_hold_every_query_and_the_keys_it_sees(
    keys: int, share: float, window: int | None
) -> None:
    queries = max(1, round(share * keys))
    found = spans(queries, keys, window)
    reached = 0
    for query, count, key, seen, banded in found:
        assert query == reached
        reached += count
        last = keys - queries + query + count - 1
        assert key + seen - 1 == last  # the last query's own key
        least = [max(0, last - back - (window or keys) + 1) for back in (count - 1, 0)]
        assert 0 <= key <= least[0]
        if not banded:  # each sees all that its piece has, up to itself
            assert key >= least[1]
        assert seen <= (keys if window is None else BLOCK + window)
    assert reached == queries


def test_a_window_is_paid_as_few_blocks_and_a_step_as_its_keys() -> None:
    assert [s[:4] for s in spans(1200, 1200, 128)] == [
        (0, 128, 0, 128), (128, 512, 0, 640), (640, 512, 512, 640), (1152, 48, 1024, 176)
    ]  # fmt: skip
    assert spans(1, 1200, 128)[0][:4] == (0, 1, 1072, 128)
    assert spans(700, 700, 700) == spans(700, 700, None)


def test_kinds_of_layers() -> None:
    gemma, mistral = load_model("gemma-3-1b"), load_model("mistral-7b-v0.1")
    assert set(layer_kinds(gemma, 512)) == {LayerKind("dense")}
    assert layer_kinds(gemma, 513)[4:6] == (LayerKind("dense", 512), LayerKind("dense"))
    assert distinct_kinds(gemma, 513) == [LayerKind("dense"), LayerKind("dense", 512)]
    assert only_kind(layer_kinds(mistral, 5000)) == LayerKind("dense", 4096)
    with pytest.raises(SpecError, match="layers of several"):
        only_kind(layer_kinds(gemma, 513))
