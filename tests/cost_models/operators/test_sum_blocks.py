"""How torch shares sums out among threads, warps and blocks, and what that takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.cost_models.operators.sum_blocks import SumShares, sum_shares
from foreplan.cost_models.predictor import Predictor
from foreplan.datasets.program import Variant, program


def shares(sums: int, elements: int, strided: int) -> tuple[float, ...]:
    row = (np.array([float(value)]) for value in (sums, elements, strided, 132, 2048))
    return tuple(float(column[0]) for column in sum_shares(*row))


@pytest.mark.parametrize(
    ("sums", "elements", "strided", "expected"),
    [
        # Rows of 1,024 by vectors: 256 threads would take four each, too few to share a warp out;
        # two rows a block of 32 x 16 threads go by each other.
        (4096, 1024, 0, (32, 512, 256, 1)),
        # One long row: a block of 512 threads, as nothing lies beside it; 2,048 elements each.
        (1, 1 << 20, 0, (16, 512, 128, 128)),
        # 64 columns of a million, four side by side: 16 x 8 threads, split among all blocks that
        # have room, 16 a multiprocessor; each thread has 63 rows.
        (64, 1 << 20, 1, (63, 128, 2112, 2112)),
    ],
)
def test_shares_by_hand(
    sums: int, elements: int, strided: int, expected: tuple[float, ...]
) -> None:
    assert shares(sums, elements, strided) == expected


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 20), st.sampled_from([0, 1, 2]))
def test_every_element_is_added_by_some_thread(sums: int, elements: int, strided: int) -> None:
    found = SumShares(*(np.array([value]) for value in shares(sums, elements, strided)))
    room = found.elements * found.threads * found.blocks
    assert 1 <= found.threads[0] <= 512
    # Columns that are no multiple of four lie beside each other by two or one.
    assert room[0] * (4 if strided == 1 else 1) >= sums * elements


def test_few_long_columns_wait_for_memory() -> None:
    """A sum that blocks share takes a second kernel, however few its bytes are."""
    columns = Variant("bf16", "bf16", "torch.backward")
    shared = program("reduction", columns, rows=64, cols=1 << 14)
    alone = program("reduction", columns, rows=1 << 14, cols=64)
    first, second = Predictor.load().predict([shared, alone], "h200")
    assert second.mean_s < 0.7 * first.mean_s < 14e-6
