"""What a stage may be by what it leaves room for: its *modes*, the variants one reserve allows.

What a stage needs once is the most over the needs of its layers (``ChainProblem.workspace_bytes``).
So the stages of a type are the union, over sets of needs, of those that use no other need and leave
room for these: in a mode memory is a plain sum under a room of its own, and a stage is whatever
some mode allows. Sets to which a need could be added for nothing stand for their subsets, so that
there are as many modes as different reserves, one where all needs are alike or memory is ample.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foreplan.solvers.chain_problem import ChainProblem, FloatArray, IntArray

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StageModes:
    """Modes of all types, ``M`` of them, type by type, of each the widest first.

    Attributes:
        of: ``[M]`` type of each.
        begin: ``[K]`` first mode of each type.
        allowed: ``[M, L, V]`` variants that it allows and the type has.
        room: ``[M, L, L+1]`` bytes for the layers of a stage ``[a, b)``, ``-inf`` if ``b <= a``.
        beyond: ``[M, L, L+1]`` bytes up to which a wider mode has the same stages.
    """

    of: IntArray
    begin: IntArray
    allowed: BoolArray
    room: FloatArray
    beyond: FloatArray

    def of_type(self, k: int) -> range:
        """Modes of a type."""
        end = self.begin[k + 1] if k + 1 < len(self.begin) else len(self.of)
        return range(int(self.begin[k]), int(end))

    def least(self, by_mode: FloatArray) -> FloatArray:
        """``[K, ...]`` the least over each type's modes of ``[M, ...]``."""
        if len(self.of) == len(self.begin):
            return by_mode
        found: FloatArray = np.minimum.reduceat(by_mode, self.begin, axis=0)
        return found


def modes_of(problem: ChainProblem, *, every: bool = False) -> StageModes:
    """The modes that make a difference.

    Args:
        problem: the instance.
        every: those too in which nothing fits, or no more than in a wider one.
    """
    of: list[int] = []
    kept: list[tuple[BoolArray, FloatArray, FloatArray]] = []
    begin = np.zeros(problem.n_types, dtype=np.int64)
    for k in range(problem.n_types):
        begin[k] = len(of)
        mine = _modes_of_type(problem, k, every=every)
        of += [k] * len(mine)
        kept += mine
    allowed, room, beyond = (np.stack(part) for part in zip(*kept, strict=True))
    return StageModes(np.array(of, dtype=np.int64), begin, allowed, room, beyond)


def stage_sums(layers: FloatArray) -> FloatArray:
    """``[..., L, L+1]`` sums over layers ``[a, b)`` of ``[..., L]``; ``inf`` if ``b <= a``."""
    n_layers = layers.shape[-1]
    inside = np.triu(np.ones((n_layers, n_layers), dtype=np.bool_))
    sums = np.full((*layers.shape, n_layers + 1), np.inf)
    # Zeros before a stage's first layer change no sum, so that every row has the same length.
    added = np.cumsum(np.where(inside, layers[..., None, :], 0.0), axis=-1)
    np.copyto(sums[..., 1:], added, where=inside)
    return sums


def _modes_of_type(
    problem: ChainProblem, k: int, *, every: bool
) -> list[tuple[BoolArray, FloatArray, FloatArray]]:
    """Allowed variants, room and what lies beyond wider modes, of each mode of a type."""
    available = problem.available[k]
    held = problem.memory_bytes[k]
    found: list[tuple[BoolArray, FloatArray, FloatArray]] = []
    widest: tuple[BoolArray, FloatArray, FloatArray] | None = None
    for needs in _need_sets(problem.workspace_bytes[k], np.unique(problem.needs[available])):
        allowed = available & np.isin(problem.needs, needs)
        room = _room(problem, k, needs)
        beyond = np.full_like(room, -np.inf)
        for wider, bytes_, _ in found:
            if (wider | ~allowed).all():
                beyond = np.maximum(beyond, bytes_)
        mode = (allowed, room, beyond)
        widest = widest or mode
        fewest = stage_sums(np.where(allowed, held, np.inf).min(axis=1))
        most = stage_sums(np.where(allowed, held, -np.inf).max(axis=1))
        if every or ((fewest <= room) & ~(most <= beyond)).any():
            found.append(mode)
    assert widest is not None
    return found or [widest]


def _need_sets(workspace: FloatArray, present: IntArray) -> list[list[int]]:
    """Sets of needs that leave room for no other need, the largest first.

    Args:
        workspace: ``[R, 4, L]`` of one type.
        present: needs that layers have there.
    """
    flat = workspace.reshape(len(workspace), -1)

    def closed(needs: Iterable[int]) -> frozenset[int]:
        most = flat[list(needs)].max(axis=0)
        return frozenset(int(r) for r in present if (flat[r] <= most).all())

    if len(present) == 0:
        return [[0]]
    sets = {closed([int(r)]) for r in present}
    fresh = set(sets)
    while fresh:
        joined = {closed(one | other) for one in fresh for other in sets}
        fresh = joined - sets
        sets |= fresh
    return sorted((sorted(s) for s in sets), key=lambda s: (-len(s), s))


def _room(problem: ChainProblem, k: int, needs: list[int]) -> FloatArray:
    """``[L, L+1]`` bytes that layers of a stage may take beside what it needs once."""
    n_layers = problem.n_layers
    once = problem.workspace_bytes[k, needs].max(axis=0)
    layers = np.arange(n_layers + 1) - np.arange(n_layers)[:, None]
    inner, first, last, alone = once[:, np.maximum(layers, 1) - 1]
    taken = inner.copy()
    taken[0], taken[:, -1] = first[0], last[:, -1]
    taken[0, -1] = alone[0, -1]
    taken += problem.fixed_memory_bytes[k]
    taken[0] += problem.first_memory_bytes[k]
    taken[:, -1] += problem.last_memory_bytes[k]
    limit = np.where(np.isfinite(taken), problem.capacity_limit_bytes[k], -np.inf)
    room = limit - np.where(np.isfinite(taken), taken, 0.0)
    return np.where(layers > 0, room, -np.inf)
