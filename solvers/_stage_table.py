"""The stage table: for every type, start and end the stages worth considering."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from foreplan.solvers._chain_box import Box, StageView
from foreplan.solvers._chain_model import ChainModel
from foreplan.solvers._stage_filter import StageFilter
from foreplan.solvers._stage_labels import extend_stages, stage_costs
from foreplan.solvers.chain_problem import FloatArray, IntArray
from foreplan.solvers.chain_score import ChainStage, make_stage


@dataclass(frozen=True, slots=True)
class StageTable:
    """Undominated stages of every arc (type k, layers ``[a, b)``).

    Attributes:
        model: the problem.
        arc_start: ``[K, L, L+1]`` first label of an arc.
        arc_stop: ``[K, L, L+1]`` one past its last label.
        rows: ``[N, 5]`` prefill_s, decode_s, memory_bytes, omega, cost2 of each label.
        history: ``[N]`` last step of the label in ``parent`` and ``variant``.
        parent: previous step, -1 at the start.
        variant: variant chosen in the step.
        target: chains with an objective below this have all their stages in the table (or stages
            that are no worse).
    """

    model: ChainModel
    arc_start: IntArray
    arc_stop: IntArray
    rows: FloatArray
    history: IntArray
    parent: IntArray
    variant: npt.NDArray[np.int8]
    target: float

    def stage(self, k: int, a: int, b: int, label: int) -> ChainStage:
        """The stage behind a label of arc (k, a, b)."""
        variants: list[int] = []
        step = int(self.history[label])
        while step != -1:
            variants.append(int(self.variant[step]))
            step = int(self.parent[step])
        return make_stage(self.model.problem, k, a, b, variants[::-1])


@dataclass(slots=True)
class TablePricing:
    """Stage costs from a table.

    Attributes:
        table: the stages.
        lift: see ``Pricing``; a table's costs are exact.
    """

    table: StageTable
    lift: float = 0.0
    _pick: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    _view: StageView | None = None

    @property
    def target(self) -> float:
        """See ``Pricing``, like the other methods."""
        return self.table.target

    def view(self) -> StageView:
        """All stages."""
        table = self.table
        labels = np.arange(len(table.rows))
        return StageView(table.arc_start, table.arc_stop, table.rows, labels)

    def costs(self, box: Box, weights: FloatArray) -> FloatArray:
        """Cheapest stage of every arc."""
        view = box.view
        assert view is not None
        cost, self._pick = stage_costs(
            view.arc_start, view.arc_stop, view.rows, box.high[0], box.high[1], weights
        )
        self._view = view
        return np.asarray(cost)

    def rows(self, path: IntArray) -> list[list[float]]:
        """Rows of the cheapest stages."""
        assert self._view is not None
        picked: list[list[float]] = self._view.rows[self._pick[tuple(path.T)]].tolist()
        return picked

    def offer(self, path: IntArray) -> list[list[float]] | None:
        """The same: a table holds real stages."""
        return self.rows(path)

    def stages(self, path: IntArray) -> tuple[ChainStage, ...]:
        """The cheapest stages."""
        assert self._view is not None
        labels = self._view.labels[self._pick[tuple(path.T)]]
        return tuple(
            self.stage(k, a, b, int(label))
            for (k, a, b), label in zip(path.tolist(), labels, strict=True)
        )

    def stage(self, k: int, a: int, b: int, label: int) -> ChainStage:
        """The stage behind a label."""
        return self.table.stage(k, a, b, label)


def build_table(model: ChainModel, keep: StageFilter, max_labels: int) -> StageTable | None:
    """Extend labels from every type and start.

    Args:
        model: the problem.
        keep: what may be left out.
        max_labels: labels, open stages included, beyond which to give up.

    Returns:
        The table, or ``None`` if it would be too large.
    """
    problem = model.problem
    n_types, n_layers = problem.n_types, problem.n_layers
    arc_start = np.zeros((n_types, n_layers, n_layers + 1), dtype=np.int64)
    arc_stop = np.zeros_like(arc_start)
    separate = np.array(
        [problem.max_omega is not None, model.sums_decode, problem.max_cost2 is not None]
    )
    floors = np.array(
        [
            keep.floors[0] if model.caps_prefill else math.inf,
            keep.floors[1] if model.caps_decode else math.inf,
        ]
    )
    rows, histories, parents, variants = [], [], [], []
    n_rows = n_steps = 0
    for k in range(n_types):
        if model.counts[k] == 0:
            continue
        times = [
            np.where(problem.available[k], x[k], math.inf)
            for x in (problem.prefill_s, problem.decode_s, problem.memory_bytes)
        ]
        largest = [np.where(np.isfinite(x), x, 0.0).max(axis=1) for x in times]
        last = np.array(
            [problem.last_prefill_s[k], problem.last_decode_s[k], problem.last_memory_bytes[k]]
        )
        for a in range(n_layers):
            stop = int(keep.stop[k, a])
            if stop <= a:
                continue
            first = np.array([0.0, 0.0, problem.fixed_memory_bytes[k]])
            if a == 0:
                first += (
                    problem.first_prefill_s[k],
                    problem.first_decode_s[k],
                    problem.first_memory_bytes[k],
                )
            if not np.isfinite(first).all():
                continue
            headroom = np.zeros((3, n_layers + 1))
            for q in range(3):
                rest = np.cumsum(largest[q][a:stop][::-1])[::-1]
                headroom[q, a:stop] = rest
                if stop == n_layers and np.isfinite(last[q]):
                    headroom[q, : n_layers + 1] += last[q]
            ends, row, history, parent, variant, gave_up = extend_stages(
                a,
                stop,
                first,
                last,
                times[0],
                times[1],
                times[2],
                problem.omega,
                problem.cost2,
                model.codes,
                np.array([*keep.caps, problem.capacity_limit_bytes[k]]),
                floors,
                headroom,
                separate,
                problem.theta,
                keep.weights[k, a],
                keep.ceilings[k, a],
                keep.slack[k, a],
                max_labels - n_steps,
            )
            if gave_up:
                return None
            bounds = np.searchsorted(ends, np.arange(n_layers + 2))
            arc_start[k, a] = n_rows + bounds[:-1]
            arc_stop[k, a] = n_rows + bounds[1:]
            rows.append(row)
            histories.append(history + n_steps)
            parents.append(np.where(parent >= 0, parent + n_steps, -1))
            variants.append(variant)
            n_rows += len(row)
            n_steps += len(parent)
    return StageTable(
        model=model,
        arc_start=arc_start,
        arc_stop=arc_stop,
        rows=np.concatenate(rows) if rows else np.zeros((0, 5)),
        history=np.concatenate(histories) if rows else np.zeros(0, dtype=np.int64),
        parent=np.concatenate(parents) if rows else np.zeros(0, dtype=np.int64),
        variant=np.concatenate(variants) if rows else np.zeros(0, dtype=np.int8),
        target=keep.target,
    )
