"""The stage table: for every type, start and end the stages worth considering."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from foreplan.solvers._chain_box import Box, StageView
from foreplan.solvers._chain_model import ChainModel
from foreplan.solvers._stage_arcs import stage_costs
from foreplan.solvers._stage_filter import StageFilter
from foreplan.solvers._stage_labels import extend_stages
from foreplan.solvers._stage_modes import stage_sums
from foreplan.solvers.chain_problem import FloatArray, IntArray
from foreplan.solvers.chain_score import ChainStage, make_stage


@dataclass(frozen=True, slots=True)
class StageTable:
    """Undominated stages of every arc (type k, layers ``[a, b)``).

    Attributes:
        model: the problem.
        arc_start: ``[K, L, L+1]`` first label of an arc.
        arc_stop: ``[K, L, L+1]`` one past its last label.
        rows: ``[N, 5]`` prefill_s, decode_s, bytes of layers, omega, cost2 of each label.
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
    modes = model.modes
    n_types, n_layers = problem.n_types, problem.n_layers
    arc_start = np.zeros((n_types, n_layers, n_layers + 1), dtype=np.int64)
    arc_stop = np.zeros_like(arc_start)
    separate = np.array([model.omega_apart, model.sums_decode, problem.max_cost2 is not None])
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
        sides = [_Mode(model, m) for m in modes.of_type(k)]
        for a in range(n_layers):
            stop = int(keep.stop[k, a])
            first = np.zeros(2)
            if a == 0:
                first += problem.first_prefill_s[k], problem.first_decode_s[k]
            if stop <= a or not np.isfinite(first).all():
                continue
            found = []
            for side in sides:
                made = side.extend(keep, a, stop, first, floors, separate, max_labels - n_steps)
                if made is None:
                    return None
                ends, row, history, parent, variant = made
                found.append((ends, row, history + n_steps))
                parents.append(np.where(parent >= 0, parent + n_steps, -1))
                variants.append(variant)
                n_steps += len(parent)
            ends, row, history = (np.concatenate(part) for part in zip(*found, strict=True))
            if len(found) > 1:
                order = np.argsort(ends, kind="stable")
                ends, row, history = ends[order], row[order], history[order]
            bounds = np.searchsorted(ends, np.arange(n_layers + 2))
            arc_start[k, a] = n_rows + bounds[:-1]
            arc_stop[k, a] = n_rows + bounds[1:]
            rows.append(row)
            histories.append(history)
            n_rows += len(row)
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


class _Mode:
    """A mode's arrays in the form in which labels are extended over them."""

    def __init__(self, model: ChainModel, mode: int) -> None:
        self._model, self._mode = model, mode
        problem, k = model.problem, int(model.modes.of[mode])
        self._type, allowed = k, model.modes.allowed[mode]
        self._quantities = [
            np.where(allowed, x[k], math.inf)
            for x in (problem.prefill_s, problem.decode_s, problem.memory_bytes)
        ]
        self._most = [np.where(np.isfinite(x), x, 0.0).max(axis=1) for x in self._quantities]
        self._fewest = stage_sums(self._quantities[2].min(axis=1))
        self._last = np.array([problem.last_prefill_s[k], problem.last_decode_s[k]])

    def extend(
        self, keep: StageFilter, a: int, stop: int, first: FloatArray, floors: FloatArray,
        separate: npt.NDArray[np.bool_], max_labels: int,
    ) -> tuple[IntArray, FloatArray, IntArray, IntArray, npt.NDArray[np.int8]] | None:  # fmt: skip
        """Stages from layer ``a``; see `extend_stages`. ``None`` if they are too many."""
        problem, k = self._model.problem, self._type
        *found, gave_up = extend_stages(
            a,
            stop,
            first,
            self._last,
            *self._quantities,
            problem.omega,
            problem.cost2,
            self._model.codes,
            np.array(keep.caps),
            self._room(a, stop),
            floors,
            self._headroom(a, stop),
            separate,
            problem.theta,
            keep.weights[self._mode, a],
            keep.ceilings[self._mode, a],
            keep.slack[k, a],
            max_labels,
        )
        ends, row, history, parent, variant = found
        return None if gave_up else (ends, row, history, parent, variant)

    def _headroom(self, a: int, stop: int) -> FloatArray:
        """``[3, L+1]`` the most that layers from a boundary to ``stop`` can still add."""
        n_layers = self._model.problem.n_layers
        headroom = np.zeros((3, n_layers + 1))
        for q in range(3):
            headroom[q, a:stop] = np.cumsum(self._most[q][a:stop][::-1])[::-1]
            if q < 2 and stop == n_layers and np.isfinite(self._last[q]):
                headroom[q, : n_layers + 1] += self._last[q]
        return headroom

    def _room(self, a: int, stop: int) -> FloatArray:
        """``[5, L+1]`` limits on memory by boundary; see `extend_stages`."""
        modes, mode = self._model.modes, self._mode
        room, beyond = modes.room[mode, a], modes.beyond[mode, a].copy()
        # An end at which nothing fits asks nothing of what goes on.
        closes = self._fewest[a] <= room * (1 + 1e-12)
        closes[: a + 1] = closes[stop + 1 :] = False
        beyond[~closes] = math.inf
        out = np.empty((5, len(room)))
        out[0], out[3] = room, beyond
        out[1] = _from_here(np.where(closes, room, -math.inf), np.maximum)
        out[2] = _from_here(np.where(closes, room, math.inf), np.minimum)
        # Sums of floats in another order must not leave out what no wider mode has.
        out[4] = _from_here(beyond, np.minimum) * (1 - 1e-9)
        return out


def _from_here(values: FloatArray, of: np.ufunc) -> FloatArray:
    """Extremes over the boundaries from each on."""
    found: FloatArray = of.accumulate(values[::-1])[::-1]
    return found
