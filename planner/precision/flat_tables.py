"""Flat tables beside a device's prices: what its host takes, and in what its ranks contend.

`DeviceReplay` gathers from them as from its prices, so that a plan costs a few gathers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from foreplan.cost_models.costs import CostBook, Segment, Work
from foreplan.cost_models.schedule import FloatArray, IntArray
from foreplan.datasets.program import Program
from foreplan.datasets.tier import ContentionKind
from foreplan.planner.contention import pressure
from foreplan.planner.precision.pricing import StepTables, Works
from foreplan.planner.precision.spec import BACKWARD, FORWARD

#: Seconds of options, forward and backward, and of casts likewise.
Flat = tuple[FloatArray, FloatArray, FloatArray, FloatArray]


@dataclass(frozen=True, slots=True, eq=False)
class Issue:
    """What a GPU's host takes to issue options and casts, flat as `DeviceReplay` has their prices.

    Attributes:
        forward: seconds by option; `cast` by cell of an edge, likewise for the backward pass.
        once_s: around the calls of a forward pass.
        once_backward_s: around those of a backward pass.
        of_options: of both passes, one array an operator.
        of_edges: ``[a, b]`` of both passes, one array an edge.
    """

    forward: FloatArray
    backward: FloatArray
    cast: FloatArray
    cast_back: FloatArray
    once_s: float
    once_backward_s: float
    of_options: tuple[FloatArray, ...]
    of_edges: tuple[FloatArray, ...]

    @classmethod
    def of(cls, tables: StepTables) -> Issue | None:
        """``None`` of a device whose host is not known, or does not run ahead of it."""
        once = [tables.issue_s(part, (), 1.0) for part in (FORWARD, BACKWARD)]
        if once[0] is None or once[1] is None:
            return None

        def seconds(part: str, works: Works) -> float:
            return tables.issue_s(part, works, 0.0) or 0.0

        forward, backward, cast, cast_back = _flat(tables, seconds)
        ends = np.cumsum([len(found) for found in tables.options])[:-1]
        shapes = [edge.forward_s.shape for edge in tables.edges]
        cuts = np.cumsum([a * b for a, b in shapes])[:-1].astype(int)
        both = np.split(cast + cast_back, cuts) if shapes else []
        return cls(
            forward, backward, cast, cast_back, once[0], once[1],
            tuple(np.split(forward + backward, ends)),
            tuple(flat.reshape(shape) for flat, shape in zip(both, shapes, strict=True)),
        )  # fmt: skip

    def forward_s(self, at: IntArray, cell: IntArray) -> float:
        """Of a whole forward pass."""
        return self.once_s + float(self.forward[at].sum() + self.cast[cell].sum())


@dataclass(frozen=True, slots=True, eq=False)
class Contending:
    """In what share of its passes a device contends with other ranks of its host; see `pressure`.

    Attributes:
        bound: seconds in which options and casts contend.
        programs: seconds of which those are a share where ranks contend for memory; ``None`` where
            all that passes take counts.
    """

    bound: Flat
    programs: Flat | None

    @classmethod
    def of(cls, tables: StepTables, costs: CostBook, kind: ContentionKind) -> Contending:
        """Of one device; ``kind`` as in `pressure`."""
        label, known = tables.device, dict[Work, float]()

        def price_s(work: Work) -> float:
            return costs.cost(work, label).mean_s

        def bound_s(part: str, works: Works) -> float:
            for work in works:
                if work not in known:
                    share = pressure(costs, label, Segment(part, ((work, 1),)), kind)
                    known[work] = share * price_s(work)
            return sum(known[work] for work in works)

        def program_s(part: str, works: Works) -> float:
            return sum(price_s(work) for work in works if isinstance(work, Program))

        programs = _flat(tables, program_s) if kind == "memory" else None
        return cls(_flat(tables, bound_s), programs)

    def shares(
        self, at: IntArray, cell: IntArray, forward_s: float, backward_s: float
    ) -> tuple[float, float]:
        """Of the forward and of the backward pass.

        Args:
            at: places of options.
            cell: places of casts.
            forward_s: what the pass takes, with what it waits.
            backward_s: likewise.
        """
        whole = forward_s, backward_s
        if self.programs is not None:
            whole = _passes(self.programs, at, cell)
        bound = _passes(self.bound, at, cell)
        return _share(bound[0], whole[0]), _share(bound[1], whole[1])


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _passes(flat: Flat, at: IntArray, cell: IntArray) -> tuple[float, float]:
    forward, backward, cast, cast_back = flat
    return (
        float(forward[at].sum() + cast[cell].sum()),
        float(backward[at].sum() + cast_back[cell].sum()),
    )


def _flat(tables: StepTables, seconds: Callable[[str, Works], float]) -> Flat:
    """Seconds of options, forward and backward, and of casts likewise."""
    options = [option for found in tables.options for option in found]
    cells = [
        (edge.forward[a][b], edge.backward[a][b])
        for edge in tables.edges
        for a in range(len(edge.forward)) for b in range(len(edge.forward[a]))
    ]  # fmt: skip
    return (
        np.array([seconds(FORWARD, o.forward) for o in options], dtype=float),
        np.array([seconds(BACKWARD, o.backward) for o in options], dtype=float),
        np.array([seconds(FORWARD, cell[0]) for cell in cells], dtype=float),
        np.array([seconds(BACKWARD, cell[1]) for cell in cells], dtype=float),
    )
