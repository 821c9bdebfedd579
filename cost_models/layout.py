"""`Layout`: which box of which tensor lies on which rank.

A box is a half-open range in every dimension. Layouts say what a rank loads (sharded loading), what
it holds (tensor parallelism), and, by comparing two of them, what must move (resharding).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from foreplan.datasets.dtypes import DTYPE_BYTES
from foreplan.errors import SpecError


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """``ranges[d] = (start, end)`` of dimension ``d``, half open."""

    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that is the whole tensor."""
        return cls(tuple((0, size) for size in shape))

    @property
    def size(self) -> int:
        """Number of elements; 0 where a range is empty."""
        return math.prod(max(end - start, 0) for start, end in self.ranges)

    def meet(self, other: Box) -> Box:
        """The common part, possibly empty."""
        pairs = zip(self.ranges, other.ranges, strict=True)
        return Box(tuple((max(a, c), min(b, d)) for (a, b), (c, d) in pairs))

    def minus(self, other: Box) -> list[Box]:
        """This box without ``other``, as disjoint boxes."""
        common = self.meet(other)
        if common.size == 0:
            return [self] if self.size else []
        rest: list[Box] = []
        ranges = list(self.ranges)
        for d, (start, end) in enumerate(common.ranges):
            low, high = ranges[d]
            for piece in ((low, start), (end, high)):
                box = Box((*ranges[:d], piece, *ranges[d + 1 :]))
                if box.size:
                    rest.append(box)
            ranges[d] = (start, end)
        return rest


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named tensor: its shape and storage dtype (packed dtypes without scales)."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "bf16"

    @property
    def element_bytes(self) -> float:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Move:
    """``box`` of a tensor goes from rank ``source`` to rank ``target``."""

    tensor: str
    box: Box
    source: int
    target: int
    bytes: int


@dataclass(frozen=True)
class Layout:
    """Boxes of tensors by rank; a box may lie on several ranks (replicas).

    Attributes:
        tensors: every tensor by name.
        boxes: for each rank, the boxes it holds by tensor name.
    """

    tensors: Mapping[str, Tensor]
    boxes: tuple[Mapping[str, tuple[Box, ...]], ...]

    def __post_init__(self) -> None:
        for rank, held in enumerate(self.boxes):
            for name, boxes in held.items():
                if name not in self.tensors:
                    raise SpecError(f"layout of rank {rank}", got=name, expected="a known tensor")
                whole = Box.whole(self.tensors[name].shape)
                for box in boxes:
                    if len(box.ranges) != len(whole.ranges) or box.meet(whole) != box:
                        raise SpecError(
                            f"layout of {name} on rank {rank}", got=box.ranges,
                            expected=f"a box inside {whole.ranges}",
                        )  # fmt: skip

    @classmethod
    def by_owner(cls, tensors: Iterable[Tensor], owner: Mapping[str, Sequence[int]]) -> Layout:
        """Whole tensors on the ranks that ``owner`` lists for each.

        Raises:
            SpecError: an owner of a tensor that is not listed, or a negative rank.
        """
        table = {tensor.name: tensor for tensor in tensors}
        count = 1 + max((r for ranks in owner.values() for r in ranks), default=-1)
        boxes: list[dict[str, tuple[Box, ...]]] = [{} for _ in range(count)]
        for name, ranks in owner.items():
            if name not in table:
                raise SpecError("layout owner", got=name, expected="a known tensor")
            if min(ranks, default=0) < 0:
                raise SpecError(f"owner of {name}", got=min(ranks), expected="ranks from 0")
            for rank in ranks:
                boxes[rank][name] = (Box.whole(table[name].shape),)
        return cls(table, tuple(boxes))

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.boxes)

    def rank_bytes(self) -> list[int]:
        """Bytes that each rank holds, boxes of one tensor counted once where they overlap."""
        return [
            round(sum(
                _covered(boxes) * self.tensors[name].element_bytes for name, boxes in held.items()
            ))
            for held in self.boxes
        ]  # fmt: skip

    def missing(self) -> dict[str, list[Box]]:
        """Parts of tensors that lie on no rank."""
        lost: dict[str, list[Box]] = {}
        for name, tensor in self.tensors.items():
            rest = [Box.whole(tensor.shape)]
            for held in self.boxes:
                for box in held.get(name, ()):
                    rest = [piece for part in rest for piece in part.minus(box)]
            if rest:
                lost[name] = rest
        return lost

    def moves_to(self, target: Layout) -> list[Move]:
        """What must travel so that every rank holds what ``target`` gives it.

        A rank takes from itself first, then from the rank that has sent the least so far.

        Raises:
            SpecError: ``target`` wants a part that no rank holds here.
        """
        sent = [0] * max(self.ranks, target.ranks)
        moves: list[Move] = []
        for rank, wanted in enumerate(target.boxes):
            own = self.boxes[rank] if rank < self.ranks else {}
            for name, boxes in wanted.items():
                rest = _disjoint(boxes)
                for mine in own.get(name, ()):
                    rest = [piece for part in rest for piece in part.minus(mine)]
                order = sorted((r for r in range(self.ranks) if r != rank), key=sent.__getitem__)
                for source in order:
                    for box in self.boxes[source].get(name, ()):
                        for part in rest:
                            common = part.meet(box)
                            if common.size:
                                size = round(common.size * target.tensors[name].element_bytes)
                                moves.append(Move(name, common, source, rank, size))
                                sent[source] += size
                        rest = [piece for part in rest for piece in part.minus(box)]
                if rest:
                    raise SpecError(
                        f"layout of {name}", got=f"{rest[0].ranges} on no rank",
                        expected=f"a holder, because rank {rank} needs it",
                    )  # fmt: skip
        return moves


def _covered(boxes: Sequence[Box]) -> int:
    """Elements in the union of boxes."""
    return sum(part.size for part in _disjoint(boxes))


def _disjoint(boxes: Sequence[Box]) -> list[Box]:
    """The union of boxes as boxes that do not overlap."""
    union: list[Box] = []
    for box in boxes:
        parts = [box] if box.size else []
        for earlier in union:
            parts = [piece for part in parts for piece in part.minus(earlier)]
        union += parts
    return union
