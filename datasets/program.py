"""Tensor programs: what is computed, on which shapes, by which kernel.

A `Program` names one fused operator by its canonical shape (the *task*) and says how it is computed
(the *variant*). It is the unit that a profile measures, a predictor predicts, `CostBook` prices and
the runtime executes; all four look kernels up under the same name, so that what is measured is
what runs. Which operators there are, and their work, is in `operators.OPERATORS`.
"""

from __future__ import annotations

from dataclasses import dataclass

from foreplan.datasets.operators import OPERATORS
from foreplan.errors import SpecError

#: What the name of a kernel says of a product or convolution that is a gradient by an operand.
INPUT_GRADIENT, WEIGHT_GRADIENT = "_input_gradient", "_weight_gradient"
#: The same of a product whose second operand is a transposed view: it lies along what is added up.
TRANSPOSED = "_transposed"
#: The same of images whose channels lie next to each other.
CHANNELS_LAST = "_channels_last"


@dataclass(frozen=True, slots=True, order=True)
class Variant:
    """How a program is computed; storage precision and compute kernel are separate choices.

    Attributes:
        storage: dtype the weights (or the cache) are kept in.
        compute: dtype of the activations and of the arithmetic.
        kernel: name in the kernel registry, which names the library too (``torch.linear``).
    """

    storage: str
    compute: str
    kernel: str

    def __str__(self) -> str:
        return f"{self.storage}/{self.compute}/{self.kernel}"

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read what ``str`` wrote.

        Raises:
            SpecError: not three words between slashes.
        """
        parts = text.split("/")
        if len(parts) != 3 or not all(parts):
            raise SpecError("variant", got=text, expected="STORAGE/COMPUTE/KERNEL")
        return cls(*parts)


class _KeptHash:
    """Where a program keeps its hash: plans look prices up a million times."""

    __slots__ = ("_hash",)
    _hash: int


@dataclass(frozen=True, slots=True)
class Program(_KeptHash):
    """One fused operator on given shapes, computed by a given variant.

    Build it with `program`, which checks the dimensions.

    Attributes:
        op: name in `OPERATORS`.
        sizes: dimensions in the operator's canonical order, all positive.
        variant: storage, compute dtype and kernel.
    """

    op: str
    sizes: tuple[int, ...]
    variant: Variant

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            # No field, so that it stays out of copies and pickles: strings hash anew each process.
            object.__setattr__(self, "_hash", hash((self.op, self.sizes, self.variant)))
            return self._hash

    @property
    def dims(self) -> dict[str, int]:
        """Dimensions by name."""
        return dict(zip(OPERATORS[self.op].dims, self.sizes, strict=True))

    @property
    def flops(self) -> float:
        """FLOP of one call."""
        return OPERATORS[self.op].flops(self.dims)

    @property
    def bytes(self) -> float:
        """Fewest bytes one call moves through memory."""
        return OPERATORS[self.op].bytes(self.dims, self.variant)

    def __str__(self) -> str:
        inner = ",".join(f"{name}={size}" for name, size in self.dims.items())
        return f"{self.op}({inner})@{self.variant}"


def program(op: str, variant: Variant, **dims: int) -> Program:
    """Build a program and check it.

    Raises:
        SpecError: unknown operator, a missing or extra dimension, or a size below 1.
    """
    if op not in OPERATORS:
        raise SpecError("program.op", got=op, expected=f"one of {sorted(OPERATORS)}")
    names = OPERATORS[op].dims
    if set(dims) != set(names):
        raise SpecError(f"program {op}", got=sorted(dims), expected=f"dimensions {list(names)}")
    for name, size in dims.items():
        if size < 1:
            raise SpecError(f"program {op}.{name}", got=size, expected="a size of at least 1")
    return Program(op, tuple(int(dims[name]) for name in names), variant)
