from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.cost_models.layout import Box, Layout, Tensor
from foreplan.errors import SpecError

SIZE = 5


def boxes(dims: int) -> st.SearchStrategy[Box]:
    ranges = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted).map(tuple)
    return st.tuples(*[ranges] * dims).map(lambda r: Box(r))


def cells(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(start, end) for start, end in box.ranges)))


pairs = st.integers(0, 3).flatmap(lambda dims: st.tuples(boxes(dims), boxes(dims)))


@given(pairs)
def test_meet_and_minus_partition_a_box(pair: tuple[Box, Box]) -> None:
    box, other = pair
    assert box.size == len(cells(box))
    common, rest = box.meet(other), box.minus(other)
    assert common.size == len(cells(box) & cells(other))
    parts = [cells(common)] if common.size else []
    parts += [cells(piece) for piece in rest]
    assert set().union(*parts) == cells(box)
    assert sum(map(len, parts)) == box.size  # nothing twice
    assert all(piece.size for piece in rest)
    assert box.minus(box) == []


@st.composite
def layouts(draw: st.DrawFn, ranks: int) -> Layout:
    """Random boxes of two tensors; every element lies somewhere, because rank 0 holds all."""
    tensors = {"w": Tensor("w", (SIZE, SIZE), "fp32"), "b": Tensor("b", (SIZE,), "bf16")}
    held = [{"w": (Box.whole((SIZE, SIZE)),), "b": (Box.whole((SIZE,)),)}]
    for _ in range(ranks - 1):
        held.append(
            {
                "w": tuple(draw(st.lists(boxes(2), max_size=3))),
                "b": tuple(draw(st.lists(boxes(1), max_size=3))),
            }
        )
    order = draw(st.permutations(held))
    return Layout(tensors, tuple(order))


def holds(layout: Layout, rank: int, name: str) -> set[tuple[int, ...]]:
    if rank >= layout.ranks:
        return set()
    return set().union(*(cells(box) for box in layout.boxes[rank].get(name, ())))


@given(layouts(3), st.integers(1, 4).flatmap(layouts))
def test_moves_cover_exactly_what_is_missing(old: Layout, new: Layout) -> None:
    moves = old.moves_to(new)
    for rank in range(new.ranks):
        for name, tensor in new.tensors.items():
            arrived: list[tuple[int, ...]] = []
            for move in moves:
                if (move.target, move.tensor) == (rank, name):
                    assert move.source != rank
                    assert cells(move.box) <= holds(old, move.source, name)
                    assert move.bytes == move.box.size * tensor.element_bytes
                    arrived += cells(move.box)
            assert len(arrived) == len(set(arrived))
            assert set(arrived) == holds(new, rank, name) - holds(old, rank, name)
    assert old.moves_to(old) == []


@given(layouts(4))
def test_bytes_of_a_rank_count_overlaps_once(layout: Layout) -> None:
    assert layout.rank_bytes() == [
        4 * len(holds(layout, rank, "w")) + 2 * len(holds(layout, rank, "b"))
        for rank in range(layout.ranks)
    ]
    assert layout.missing() == {}


def test_owners_replicas_and_what_is_missing() -> None:
    tensors = [Tensor("a", (4, 8), "int4"), Tensor("b", (3,), "fp32"), Tensor("c", (), "fp32")]
    layout = Layout.by_owner(tensors, {"a": [0, 2], "b": [1]})
    assert layout.ranks == 3
    assert layout.rank_bytes() == [16, 12, 16]
    assert layout.missing() == {"c": [Box(())]}
    target = Layout.by_owner(tensors, {"b": [0]})
    (move,) = layout.moves_to(target)
    assert (move.tensor, move.source, move.target, move.bytes) == ("b", 1, 0, 12)
    with pytest.raises(SpecError, match="because rank 0 needs it"):
        layout.moves_to(Layout.by_owner(tensors, {"c": [0]}))


def test_senders_share_the_load() -> None:
    tensors = [Tensor(f"t{i}", (10,), "fp32") for i in range(6)]
    old = Layout.by_owner(tensors, {t.name: [0, 1, 2] for t in tensors})
    new = Layout.by_owner(tensors, {t.name: [3] for t in tensors})
    sources = np.bincount([move.source for move in old.moves_to(new)])
    assert sources.tolist() == [2, 2, 2]


def test_what_cannot_be_a_layout() -> None:
    tensor = Tensor("a", (4,))
    with pytest.raises(SpecError, match="a known tensor"):
        Layout({}, ({"a": (Box.whole((4,)),)},))
    for box in (Box(((0, 5),)), Box(((-1, 2),)), Box(((0, 4), (0, 1)))):
        with pytest.raises(SpecError, match="layout of a on rank 0"):
            Layout({"a": tensor}, ({"a": (box,)},))
    with pytest.raises(SpecError, match="layout owner: got 'z'"):
        Layout.by_owner([tensor], {"z": [0]})
    with pytest.raises(SpecError, match="ranks from 0"):
        Layout.by_owner([tensor], {"a": [-1]})
