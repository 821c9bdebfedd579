"""`EinsumTerms`: which dimensions of two operands an ``einsum`` multiplies, keeps and adds up.

torch computes it as a list of matrix products, whatever the order of the letters
(``sumproduct_pair`` of ``Linear.cpp``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EinsumTerms:
    """Letters of an equation of two operands.

    Attributes:
        operands: the letters of each.
        matrices: those of both that the result has: one product for each of their places.
        summed: those of both that it has not.
        result: its letters.
    """

    operands: tuple[str, str]
    matrices: tuple[str, ...]
    summed: tuple[str, ...]
    result: str

    @classmethod
    def of(cls, equation: str) -> EinsumTerms | None:
        """Read an equation; ``None`` of other than two operands, of dots, or without a result."""
        terms, _, result = equation.replace(" ", "").partition("->")
        operands = terms.split(",")
        if len(operands) != 2 or "." in equation or not result:
            return None
        left, right = operands
        both = [letter for letter in left if letter in right]
        return cls(
            (left, right),
            tuple(letter for letter in both if letter in result),
            tuple(letter for letter in both if letter not in result),
            result,
        )

    def sizes(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """Batch, ``m``, ``n`` and ``k`` of the product.

        Letters of one operand that the result has not are added up before it.

        Args:
            shapes: of the operands.
        """
        extents: dict[str, int] = {}
        for letters, shape in zip(self.operands, shapes, strict=True):
            for letter, extent in zip(letters, shape, strict=True):
                extents[letter] = max(extent, extents.get(letter, 1))  # 1 is broadcast
        found = dict.fromkeys(("batch", "m", "n", "k"), 1)
        for letter, extent in extents.items():
            if letter in self.matrices:
                found["batch"] *= extent
            elif letter in self.summed:
                found["k"] *= extent
            elif letter in self.result:
                found["m" if letter in self.operands[0] else "n"] *= extent
        return found
