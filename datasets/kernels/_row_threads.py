"""`in_parts`: runs a compiled loop over ranges of an index on as many threads as torch uses.

Our loops let go of the interpreter's lock, so that plain threads will do. Small work is not worth
waking them.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

#: Elements below which one thread is faster (about 50 us of quantising).
_LEAST_ELEMENTS = 1 << 19
#: Loops need little stack, and stacks count towards a rank's memory cap.
_STACK_BYTES = 256 << 10


def in_parts(run: Callable[[int, int], None], count: int, elements: int) -> None:
    """Call ``run(begin, end)`` for ranges that make up ``0..count``.

    Args:
        run: independent of other ranges.
        count: length of the index.
        elements: what all ranges touch together.
    """
    threads = min(torch.get_num_threads(), count)
    if threads < 2 or elements < _LEAST_ELEMENTS:
        run(0, count)
        return
    cuts = [count * i // threads for i in range(threads + 1)]
    pool = _pool(threads - 1)
    others = [pool.submit(run, begin, end) for begin, end in itertools.pairwise(cuts[1:])]
    run(0, cuts[1])
    for other in others:
        other.result()


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(threads, "quantise")
    before = threading.stack_size(_STACK_BYTES)
    try:
        # Each waits for all, so that all are started while stacks are small.
        together = threading.Barrier(threads)
        for started in [pool.submit(together.wait) for _ in range(threads)]:
            started.result()
    finally:
        threading.stack_size(before)
    return pool
