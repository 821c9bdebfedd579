"""Kernels of a fused update, as torch packs tensors into them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foreplan.datasets.sweeps.update_packing import packed_update

CHUNK = 65536


def test_kernels_by_hand() -> None:
    assert packed_update([]) == (0, 0)
    assert packed_update([0, 0]) == (0, 0)
    assert packed_update([100, 300, 200]) == (1, 300)
    # 36 tensors fill a kernel; a tensor of nothing takes no place.
    assert packed_update([7] * 36) == (1, 7)
    assert packed_update([7] * 36 + [0, 9]) == (2, 16)
    # 320 chunks fill one, too: the rest of the tensor is in the next.
    assert packed_update([321 * CHUNK]) == (2, 2 * CHUNK)
    assert packed_update([320 * CHUNK + 5]) == (2, CHUNK + 5)
    # A rest counts as a tensor of the next kernel.
    assert packed_update([320 * CHUNK + 5, *[1] * 35]) == (2, CHUNK + 5)
    assert packed_update([320 * CHUNK + 5, *[1] * 36]) == (3, CHUNK + 6)


@given(st.lists(st.integers(0, 1 << 26), max_size=120))
def test_every_element_is_in_a_kernel(sizes: list[int]) -> None:
    kernels, longest = packed_update(sizes)
    full = sum(1 for size in sizes if size)
    chunks = sum(-(-size // CHUNK) for size in sizes)
    assert max(-(-full // 36), -(-chunks // 320)) <= kernels <= chunks
    assert kernels <= longest <= kernels * CHUNK
    assert longest >= min(max(sizes, default=0), CHUNK)
