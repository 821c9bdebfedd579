"""Search over head, tail and map; see ``gap_fill`` for the method, `Filler` for one pipeline."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from foreplan.solvers._gap_filler import Filler, Incumbent, merged_map
from foreplan.solvers.gap_fill_problem import IntArray

HEADS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
"""Heads tried beyond the least one, as shares of the tail that could be saved."""


@dataclass(slots=True)
class Search:
    """Heads and maps of one orientation of time.

    Attributes:
        filler: what places units.
        floor: least head of the forwards alone.
        target: total at which to stop.
        max_evaluations: passes at which to stop.
        best: incumbent; between orientations its ``total`` alone.
    """

    filler: Filler
    floor: float
    target: float
    max_evaluations: int
    best: Incumbent = field(default_factory=Incumbent)

    @property
    def over(self) -> bool:
        """Whether nothing is left to do or to spend."""
        return self.best.total <= self.target or self.filler.evaluations >= self.max_evaluations

    def offer(self, head: float, pipeline: IntArray) -> float:
        """Tail of a map at a head, kept if it is the best; ``inf`` if it is late."""
        late, total = self.filler.score(head, pipeline)
        if late > 0.0:
            return math.inf
        if total < self.best.total:
            answer = self.filler.answer(head, pipeline)
            self.best = Incumbent(head, total, pipeline.copy(), answer)
        return total - head - self.filler.rows.length

    def run(self, tail: float) -> None:
        """Search from the least head and the least tail of the two directions alone."""
        rows, head = self.filler.rows, self.floor
        pipeline, _ = merged_map(rows, head)
        longest = self.offer(head, pipeline)
        if not math.isfinite(longest):
            longest = self.best.total - rows.length - head
        span = max(0.0, longest - tail)
        other, _ = merged_map(self.filler.mirror, tail)
        numbers = [np.bincount(x, minlength=len(rows.first_piece)) for x in (pipeline, other)]
        for share in HEADS:
            if self.over:
                return
            self.filler.forget()
            self._shorten(head + share * span, tail, numbers)
        self.tighten()

    def _shorten(self, head: float, tail: float, numbers: list[IntArray]) -> None:
        """Bisect the tail at one head, asking first for less than the incumbent."""
        rows = self.filler.rows
        step = 0.25 * max(self.target - self._bound(head, tail), 1e-5 * rows.length)
        low = tail
        high = self.best.total - rows.length - head - step
        first = True
        while not self.over and high >= low:
            middle = high if first else 0.5 * (low + high)
            found = self._try(head, middle, numbers)
            if found is None:
                if first:
                    return
                low = middle + step
            else:
                numbers.insert(0, np.bincount(found, minlength=len(rows.first_piece)))
                del numbers[4:]
                high = min(middle, self.offer(head, found)) - step
            first = False

    def _bound(self, head: float, tail: float) -> float:
        return head + self.filler.rows.length + tail

    def tighten(self) -> None:
        """Bisect the head of the incumbent's map, as long as its total does not rise."""
        low, high, pipeline = self.floor, self.best.head, self.best.pipeline
        while pipeline is not None and high - low > self.filler.rows.tolerance and not self.over:
            self.filler.forget()
            middle = 0.5 * (low + high)
            before = self.best.total
            tail = self.offer(middle, pipeline)
            fell = middle + self.filler.rows.length + tail <= before
            low, high = (low, middle) if fell else (middle, high)

    def _try(self, head: float, tail: float, numbers: list[IntArray]) -> IntArray | None:
        for counts in numbers:
            found = self.filler.match(head, tail, counts)
            if found is not None or self.over:
                return found
        return None


def improve(search: Search, head: float, pipeline: IntArray) -> None:
    """Move slots between pipelines and swap them while lateness or the total falls."""
    filler = search.filler
    best = filler.score(head, pipeline)
    search.offer(head, pipeline)
    changed = True
    while changed and not search.over:
        changed = False
        for candidate in _neighbours(pipeline, len(filler.rows.first_piece)):
            if search.over:
                break
            score = filler.score(head, candidate)
            if score < best:
                best, pipeline, changed = score, candidate, True
                search.offer(head, pipeline)
                break


def _neighbours(pipeline: IntArray, pipelines: int) -> Iterator[IntArray]:
    for i in range(len(pipeline)):
        for j in range(pipelines):
            if j != pipeline[i]:
                moved = pipeline.copy()
                moved[i] = j
                yield moved
    for i in range(len(pipeline)):
        for k in range(i + 1, len(pipeline)):
            if pipeline[i] != pipeline[k]:
                swapped = pipeline.copy()
                swapped[[i, k]] = pipeline[[k, i]]
                yield swapped
