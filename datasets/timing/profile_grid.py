"""ProfileGrid: which programs a profile measures.

Two parts: a generic grid over the sizes of decoders, from which other shapes are interpolated, and
the exact shapes of given models, which are then priced as measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from foreplan.datasets.experts import EXPERT_OPERATORS
from foreplan.datasets.kernels.registry import kernels_for, layout_of
from foreplan.datasets.program import Program, Variant, program

#: (n, k) of the generic grid: square, widening and narrowing projections, factor 4 apart.
_WEIGHTS = ((512, 512), (2048, 512), (512, 2048), (2048, 2048), (5632, 2048), (2048, 5632))
_GPU_WEIGHTS = ((1024, 1024), (4096, 1024), (4096, 4096), (14336, 4096), (4096, 14336))
#: (n, k) of a language model's head, whose weight is kept in bf16.
_HEAD, _GPU_HEAD = (32000, 2048), (128256, 4096)
_ROWS = (1, 8, 64, 256)
_GPU_ROWS = (1, 16, 128, 1024, 8192)
_COLS = (512, 2048, 8192)
_VOCABULARIES = (32000, 131072)
#: batch, queries, keys, heads, kv_heads, head_dim.
_ATTENTION = (
    (1, 1, 32, 16, 16, 64),
    (1, 1, 1024, 16, 16, 64),
    (1, 1, 512, 32, 8, 128),
    (4, 1, 256, 12, 12, 64),
    (8, 1, 128, 16, 4, 64),
    (8, 1, 1024, 32, 8, 64),
    (32, 1, 256, 16, 16, 64),
    (1, 32, 32, 16, 16, 64),
    (1, 512, 512, 16, 16, 64),
    (1, 256, 256, 32, 8, 128),
    (4, 128, 128, 12, 12, 64),
    (8, 64, 64, 16, 4, 64),
    (4, 256, 256, 32, 8, 64),
)


@dataclass(frozen=True, slots=True)
class ProfileGrid:
    """Programs in the order they are measured: those that share a packed weight together.

    Attributes:
        programs: without repetition.
    """

    programs: tuple[Program, ...]

    def __iter__(self) -> Iterator[Program]:
        return iter(self.programs)

    def __len__(self) -> int:
        return len(self.programs)

    @classmethod
    def exact(cls, programs: Iterable[Program]) -> ProfileGrid:
        """Exactly these programs, ordered for measuring."""
        return cls(tuple(sorted(dict.fromkeys(programs), key=_order)))

    @classmethod
    def generic(cls, device_kind: str, *, variants: Sequence[Variant] | None = None) -> ProfileGrid:
        """The grid for decoders in general.

        Args:
            device_kind: ``cpu`` or ``cuda``.
            variants: keep only these linear variants; all of the device kind by default.

        Raises:
            SpecError: unknown device kind.
        """
        cpu = device_kind == "cpu"
        found: list[Program] = []
        row_counts = _ROWS if cpu else _GPU_ROWS
        for n, k in _WEIGHTS if cpu else _GPU_WEIGHTS:
            for variant in kernels_for("linear", device_kind, n=n, k=k):
                if variants is None or variant in variants:
                    found += [
                        program("linear", variant, rows=rows, n=n, k=k) for rows in row_counts
                    ]
        head = dict(zip("nk", _HEAD if cpu else _GPU_HEAD, strict=True))
        for variant in kernels_for("linear", device_kind, **head):
            if variant.storage == "bf16" and (variants is None or variant in variants):
                found += [program("linear", variant, rows=r, **head) for r in row_counts[:2]]
        for rows, cols in itertools.product(row_counts[:2], _VOCABULARIES):
            variant = kernels_for("argmax", device_kind)[0]
            found.append(program("argmax", variant, rows=rows, cols=cols))
        for variant in kernels_for("attention", device_kind):
            names = ("batch", "queries", "keys", "heads", "kv_heads", "head_dim")
            for sizes in _ATTENTION:
                dims = dict(zip(names, sizes, strict=True))
                found.append(program("attention", variant, **dims))
        for op in ("norm", "activation", "add", "embedding", "argmax", "cast"):
            for variant in kernels_for(op, device_kind):
                for rows in row_counts:
                    found += [program(op, variant, rows=rows, cols=cols) for cols in _COLS]
        for rows in row_counts:
            for heads in (8, 32):
                found.append(
                    program("rope", kernels_for("rope", device_kind)[0],
                            rows=rows, heads=heads, head_dim=64)
                )  # fmt: skip
                for (batch, tokens), variant in itertools.product(
                    ((rows, 1), (1, rows)), kernels_for("cache_write", device_kind)
                ):
                    found.append(
                        program("cache_write", variant,
                                batch=batch, tokens=tokens, kv_heads=heads, head_dim=64)
                    )  # fmt: skip
        return cls.exact(found)

    def with_programs(self, programs: Iterable[Program]) -> ProfileGrid:
        """This grid and more programs."""
        return self.exact([*self.programs, *programs])


def _order(item: Program) -> tuple[object, ...]:
    """Linear programs by weight and layout, because packing takes longer than measuring."""
    if item.op == "linear":
        rows, n, k = item.sizes
        return (item.op, n, k, layout_of(item.variant), rows, str(item.variant))
    if item.op in EXPERT_OPERATORS:
        rows, *rest = item.sizes
        return (item.op, *rest, layout_of(item.variant), rows, str(item.variant))
    return (item.op, str(item.variant), *item.sizes)
