"""What the search over bottleneck boxes passes around: boxes, prices and where they come from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from foreplan.solvers._chain_devices import CountedDevices
from foreplan.solvers._chain_model import ChainModel
from foreplan.solvers.chain_problem import FloatArray, IntArray
from foreplan.solvers.chain_score import ChainStage

Multipliers = tuple[float, float, float]
"""lambda, u, w."""


@dataclass(frozen=True, slots=True)
class StageView:
    """Stages still in the race in one box: ``rows[arc_start:arc_stop]`` of each arc.

    Attributes:
        arc_start: ``[K, L, L+1]``.
        arc_stop: ``[K, L, L+1]``.
        rows: ``[N, 5]`` as in ``_stage_labels``.
        labels: ``[N]`` their labels in the table.
    """

    arc_start: IntArray
    arc_stop: IntArray
    rows: FloatArray
    labels: IntArray


@dataclass(slots=True)
class Box:
    """A part of the bottleneck plane; seconds.

    Attributes:
        low: least max P and max D.
        high: largest.
        bound: proven bound on the objective inside.
        multipliers: lambda, u, w to start from.
        view: stages to choose from; ``None`` if the pricing needs none.
        raw: the bound that its own multipliers give; linear in ``low``.
        worst: max P and max D of the chain that attains it.
        priced: whether ``raw`` and ``worst`` belong to these caps.
        valid: bounds hold up to here, the stop value when the view was last thinned.
        room: distance from bound to stop value at that time.
        step: relative distance of the next label target.
        labels: how many labels may be spent on it.
        starved: whether they did not suffice.
        stuck: whether nothing more can be done with it.
    """

    low: tuple[float, float]
    high: tuple[float, float]
    bound: float
    multipliers: Multipliers
    view: StageView | None
    raw: float = -math.inf
    worst: tuple[float, float] = (0.0, 0.0)
    priced: bool = False
    valid: float = math.inf
    room: float = math.inf
    step: float = 2e-3
    labels: int = 10_000
    starved: bool = False
    stuck: bool = False


class Pricing(Protocol):
    """Where the costs of stages come from.

    Attributes:
        lift: by how much the last call of `rows` lifted the costs of its path, in place.
    """

    lift: float

    @property
    def target(self) -> float:
        """Objective below which its bounds hold, seconds."""

    def costs(self, box: Box, weights: FloatArray) -> FloatArray:
        """Bounds ``[K, L, L+1]`` on a linear form over the stages within a box's caps."""

    def rows(self, path: IntArray) -> list[list[float]]:
        """Rows that attain the last costs on a path ``[S, 3]`` of (type, start, end)."""

    def offer(self, path: IntArray) -> list[list[float]] | None:
        """Rows of real stages on the path, if it found some that meet the caps."""

    def stages(self, path: IntArray) -> tuple[ChainStage, ...]:
        """The stages last offered."""

    def stage(self, k: int, a: int, b: int, label: int) -> ChainStage:
        """The stage behind a label of a view."""


@dataclass(slots=True)
class Price:
    """One evaluation of a box.

    Attributes:
        bound: seconds.
        slope: of the bound by multiplier.
        worst: max P and max D of the chain that attains it.
        multipliers: lambda, u, w.
        weights: ``[5]`` linear form over stage rows that was minimised.
        arc_cost: ``[K, L, L+1]`` its minimum by stage.
        hop: ``[K, K]`` scalarised hops.
        back: ``[K, K]`` scalarised return hops.
        constant: seconds that turn scalarised costs into bounds.
        needed: devices that had to be counted for it.
        node: scalarised completion costs, once `Search.completions` was asked for them.
        counted: devices that these count.
    """

    bound: float
    slope: tuple[float, float, float]
    worst: tuple[float, float]
    multipliers: Multipliers
    weights: FloatArray
    arc_cost: FloatArray
    hop: FloatArray
    back: FloatArray
    constant: float
    needed: CountedDevices
    node: FloatArray | None = None
    counted: CountedDevices | None = None


def whole(model: ChainModel, view: StageView | None) -> Box:
    """The box of all chains."""
    problem = model.problem
    edges = ("first", "last")
    high = []
    for quantity, links in (
        ("prefill_s", (problem.link_prefill_s,)),
        ("decode_s", (model.link_decode_s, model.back_decode_s)),
    ):
        layers = getattr(problem, quantity)
        arrays = [layers[:, i] for i in range(problem.n_layers)]
        arrays += [getattr(problem, f"{edge}_{quantity}") for edge in edges]
        largest = sum(float(x[np.isfinite(x)].max(initial=0.0)) for x in arrays)
        high.append(max([largest, *(float(x[np.isfinite(x)].max(initial=0.0)) for x in links)]))
    return Box(
        low=(0.0, 0.0),
        high=(high[0] * (1 + 1e-9), high[1] * (1 + 1e-9)),
        bound=0.0,
        multipliers=(0.0, 0.0, 0.0),
        view=view,
    )
