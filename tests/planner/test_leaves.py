"""What works are made of, as arrays and one by one, and the prices that follow."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foreplan.cost_models.costs import Copy, HostLaunch, Segment, Work
from foreplan.planner.leaves import Leaves, leaves_of

WORKS = st.recursive(
    st.builds(Copy, st.integers(1, 3)) | st.builds(HostLaunch, st.integers(0, 2)),
    lambda inner: st.builds(
        lambda parts: Segment("pass", tuple(parts)),
        st.lists(st.tuples(inner, st.integers(1, 3)), max_size=3),
    ),
    max_leaves=8,
)


@given(st.lists(WORKS, min_size=1, max_size=4), st.data())
def test_cells_are_the_leaves_in_their_order(works: list[Work], data: st.DataObject) -> None:
    whole = [works[0]] if data.draw(st.booleans()) else []
    asked = data.draw(st.lists(st.integers(0, len(works) - 1), max_size=6))
    leaves = Leaves(works, whole)
    row, leaf, count = leaves.cells(np.array(asked, dtype=np.int64))
    found = [(int(r), leaves.works[k], int(n)) for r, k, n in zip(row, leaf, count, strict=True)]
    assert found == [
        (r, part, times)
        for r, index in enumerate(asked)
        for part, times in (
            [(works[index], 1)] if works[index] in whole else leaves_of(works[index], 1)
        )
    ]
    assert len(set(leaves.works)) == len(leaves.works)
