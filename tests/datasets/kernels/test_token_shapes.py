"""How one new token's attention is cut, and what it is said to take."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.datasets.kernels.token_shapes import (
    HEADS,
    MOST_PARTS,
    STEP_KEYS,
    attends_at_once,
    takes_rows,
    token_seconds,
    token_shape,
    token_sums_bytes,
)

SIZES = st.fixed_dictionaries({
    "batch": st.integers(1, 300), "kv_heads": st.sampled_from([1, 2, 4, 8, 32]),
    "features": st.sampled_from([32, 64, 128, 192, 256]), "keys": st.integers(1, 100_000),
})  # fmt: skip


@given(SIZES, st.integers(1, 20))
def test_keys_are_cut_so_that_each_part_has_some(sizes: dict[str, int], shared: int) -> None:
    heads = shared * sizes["kv_heads"]
    shape = token_shape(heads=heads, **sizes)
    assert 1 <= shape.parts <= MOST_PARTS
    steps = -(-sizes["keys"] // STEP_KEYS)
    assert shape.parts <= steps
    # No part is empty: they begin at steps * part // parts.
    starts = [steps * part // shape.parts for part in range(shape.parts + 1)]
    assert all(begin < end for begin, end in itertools.pairwise(starts))
    tiles = -(-shared // HEADS)
    assert shape.blocks == sizes["batch"] * sizes["kv_heads"] * tiles
    assert shape.parts == 1 or shape.blocks * shape.parts <= 264
    sums = token_sums_bytes(heads=heads, **sizes)
    assert (sums == 0) == (shape.parts == 1)
    assert sums <= 264 * HEADS * 4 * (sizes["features"] + 2)


@given(SIZES, st.integers(1, 20), st.sampled_from([8, 16]), st.integers(8, 132))
def test_more_sequences_and_fewer_multiprocessors_are_never_faster(
    sizes: dict[str, int], shared: int, bits: int, units: int
) -> None:
    heads = shared * sizes["kv_heads"]

    def seconds(of: dict[str, int], on: int) -> float:
        return token_seconds(heads=heads, **of, bits=bits, units=on, bandwidth=4e12)

    found = seconds(sizes, units)
    moved = 2 * sizes["batch"] * sizes["kv_heads"] * sizes["keys"] * sizes["features"] * bits / 8
    assert found > moved / 4e12
    assert found >= seconds(sizes, 132) * (1 - 1e-12)
    more = sizes | {"batch": 4 * sizes["batch"]}
    assert seconds(more, units) >= 0.99 * found


@pytest.mark.parametrize(
    ("queries", "features", "compute", "capability", "taken"),
    [
        (1, 128, "bf16", "9.0", True), (1, 96, "bf16", "8.0", True),
        (2, 128, "bf16", "9.0", False), (1, 80, "bf16", "9.0", False),
        (1, 512, "bf16", "9.0", False), (1, 128, "fp32", "9.0", False),
        (1, 128, "bf16", "7.5", False), (1, 128, "bf16", None, False),
        (1, 128, "bf16", "12.0", True),
    ],
)  # fmt: skip
def test_what_is_attended_to_at_once(
    queries: int, features: int, compute: str, capability: str | None, taken: bool
) -> None:
    assert attends_at_once(queries, features, compute, capability) == taken


def test_maps_in_one_launch_need_instructions() -> None:
    assert takes_rows("8.0")
    assert takes_rows("12.0")
    assert not takes_rows("7.5")
    assert not takes_rows("gfx942")
    assert not takes_rows(None)
