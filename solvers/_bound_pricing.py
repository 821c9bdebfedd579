"""Stage costs without a table: the search runs first on bounds (``_stage_bound``)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from foreplan.solvers._chain_box import Box
from foreplan.solvers._chain_model import ChainModel
from foreplan.solvers._stage_bound import bound_stages, layer_minima
from foreplan.solvers._stage_forms import stage_forms, tune_arcs
from foreplan.solvers._stage_modes import BoolArray, stage_sums
from foreplan.solvers._stage_repair import meet_budgets, repair_path, tune_path
from foreplan.solvers.chain_problem import FloatArray, IntArray
from foreplan.solvers.chain_score import ChainStage, make_stage

POOL = 192
"""Multipliers kept a mode: with few, tuning one stage forgets another and bounds swing."""


@dataclass(slots=True)
class BoundPricing:
    """Bounds on stages by Lagrange multipliers for their caps, the least over a type's modes.

    Attributes:
        model: the problem.
        target: objective below which the bounds hold: always.
        lift: see ``Pricing``.
    """

    model: ChainModel
    target: float = math.inf
    lift: float = 0.0
    _pool: FloatArray = field(init=False)
    _sizes: IntArray = field(init=False)
    _wins: IntArray = field(init=False)
    _costs: FloatArray = field(init=False)
    _least: FloatArray = field(init=False)
    _blocked: IntArray = field(init=False)
    _edges: FloatArray = field(init=False)
    _weights: FloatArray = field(init=False)
    _scalar: FloatArray = field(init=False)
    _minima: FloatArray = field(init=False)
    _by_mode: FloatArray = field(init=False)
    _arc: FloatArray = field(init=False)
    _modes: IntArray = field(init=False)
    _caps: FloatArray = field(init=False)
    _variants: IntArray = field(init=False)
    _repaired: FloatArray = field(init=False)
    _tuned: FloatArray = field(init=False)
    _fitting: BoolArray = field(init=False)

    def __post_init__(self) -> None:
        problem, modes = self.model.problem, self.model.modes
        n_modes, n_layers = len(modes.of), problem.n_layers
        self._pool = np.zeros((n_modes, POOL, 3))
        self._sizes = np.ones(n_modes, dtype=np.int64)
        self._wins = np.zeros((n_modes, POOL), dtype=np.int64)
        available = modes.allowed
        quantities = [
            x[modes.of] for x in (problem.prefill_s, problem.decode_s, problem.memory_bytes)
        ]
        self._costs = np.stack([np.where(available, x, 0.0) for x in quantities], axis=1)
        least = np.stack([np.where(available, x, math.inf).min(axis=2) for x in quantities], 1)
        blocked = np.asarray(~available.any(axis=2))
        self._blocked = np.zeros((n_modes, n_layers + 1), dtype=np.int64)
        self._blocked[:, 1:] = np.cumsum(blocked, axis=1)
        self._least = np.zeros((n_modes, 3, n_layers + 1))
        self._least[:, :, 1:] = np.cumsum(np.where(blocked[:, None], 0.0, least), axis=2)
        held = stage_sums(least[:, 2])
        # Prefix sums round; what is within rounding of the room stays in.
        self._fitting = held <= modes.room + 1e-12 * np.where(np.isfinite(held), held, 0.0)
        self._edges = np.zeros((n_modes, 3, 3))
        for e, edge in enumerate(("first", "last"), start=1):
            for q, quantity in enumerate(("prefill_s", "decode_s")):
                self._edges[:, e, q] = getattr(problem, f"{edge}_{quantity}")[modes.of]

    def costs(self, box: Box, weights: FloatArray) -> FloatArray:
        """Bounds on all stages; see ``Pricing``, like the other methods."""
        modes = self.model.modes
        self._weights, self._scalar = weights, self.scalar(weights)
        self._minima = layer_minima(self._scalar, self._costs, self._pool, self._sizes)
        self._caps = np.array(box.high)
        self._by_mode = bound_stages(
            self._minima,
            self._least,
            self._blocked,
            self._edges,
            self.edge_scalar(weights),
            self._pool,
            self._sizes,
            self._caps,
            modes.room,
        )
        self._arc = modes.least(self._by_mode)
        return self._arc

    def scalar(self, weights: FloatArray) -> FloatArray:
        """``[M, L, V]`` linear form of a layer, ``inf`` where unavailable."""
        problem = self.model.problem
        form = weights[0] * self._costs[:, 0] + weights[1] * self._costs[:, 1]
        form = form + weights[3] * problem.omega + weights[4] * problem.cost2
        return np.where(self.model.modes.allowed, form, math.inf)

    def edge_scalar(self, weights: FloatArray) -> FloatArray:
        """``[M, 3]`` the same form of the extras of every, the first and the last stage."""
        # An infinite extra forbids; it must not meet a zero weight.
        decode = np.where(
            np.isfinite(self._edges[:, :, 1]), self._edges[:, :, 1] * weights[1], math.inf
        )
        form: FloatArray = self._edges[:, :, 0] * weights[0] + decode
        return form

    def rows(self, path: IntArray) -> list[list[float]]:
        """What the multipliers choose on a path; it need not meet the caps."""
        problem, places = self.model.problem, tuple(path.T)
        before = self._arc[places].sum()
        edge_scalar, rows = self.edge_scalar(self._weights), np.zeros((len(path), 5))
        self._modes = np.full(len(path), -1)
        self._tuned = np.zeros((len(path), 3))
        # A lifted mode may give way to another one, which then is to be tuned in its turn.
        while True:
            modes = np.array([self._cheapest_mode(k, a, b) for k, a, b in path.tolist()], dtype=int)
            stale = modes != self._modes
            if not stale.any():
                break
            self._modes[stale] = modes[stale]
            rows[stale], self._tuned[stale] = tune_path(
                np.column_stack([modes, path[:, 1:]])[stale],
                self._scalar,
                self._costs,
                problem.omega,
                problem.cost2,
                self._edges,
                edge_scalar,
                self._caps,
                self.model.modes.room,
                self._minima,
                self._by_mode,
                self._pool,
                self._sizes,
                self._wins,
            )
            for k, a, b in path[stale].tolist():
                self._arc[k, a, b] = self._by_mode[self._cheapest_mode(k, a, b), a, b]
        self.lift = float(self._arc[places].sum() - before)
        found: list[list[float]] = rows.tolist()
        return found

    def _cheapest_mode(self, k: int, a: int, b: int) -> int:
        """The mode that bounds a stage."""
        every = self.model.modes.of_type(k)
        if len(every) == 1:
            return every[0]
        return every[0] + int(self._by_mode[every[0] : every[-1] + 1, a, b].argmin())

    def offer(self, path: IntArray) -> list[list[float]] | None:
        """The repaired stages."""
        problem = self.model.problem
        self._variants, self._repaired, fitting = repair_path(
            np.column_stack([self._modes, path[:, 1:]]),
            self._scalar,
            self._costs,
            problem.omega,
            problem.cost2,
            self._edges,
            self._caps,
            self.model.modes.room,
            self._tuned,
        )
        if fitting < len(path):
            return None
        if problem.max_omega is not None or problem.max_cost2 is not None:
            self._meet_budgets(path)
        rows: list[list[float]] = self._repaired.tolist()
        return rows

    def _meet_budgets(self, path: IntArray) -> None:
        """Change the repaired stages until budgets hold; not at all if that fails."""
        problem = self.model.problem
        layers = np.arange(problem.n_layers)
        stage = np.repeat(np.arange(len(path)), path[:, 2] - path[:, 1])
        modes = self._modes[stage]
        plain = self.scalar(np.array([1.0, self._weights[1], 0.0, problem.theta, 0.0]))
        costs = np.ascontiguousarray(self._costs[modes, :, layers].transpose(1, 0, 2))
        budgeted = np.stack([problem.omega, problem.cost2])
        limits = np.array([problem.omega_limit, problem.cost2_limit])
        free = np.full((len(path), 3), math.inf)
        free[:, 2] = self.model.modes.room[self._modes, path[:, 1], path[:, 2]]
        caps = free.copy()
        caps[:, :2] = self._caps
        for allowed in (caps, free):
            choice, sums = self._variants.copy(), self._repaired[:, :3].copy()
            if meet_budgets(
                choice, stage, plain[modes, layers], costs, sums, allowed, budgeted, limits
            ):
                self._variants = choice
                self._repaired[:, :3] = sums
                for q in range(2):
                    spent = budgeted[q, layers, choice]
                    self._repaired[:, 3 + q] = np.add.reduceat(spent, path[:, 1])
                return

    def stages(self, path: IntArray) -> tuple[ChainStage, ...]:
        """The repaired stages."""
        problem = self.model.problem
        return tuple(
            make_stage(problem, k, a, b, self._variants[a:b].tolist()) for k, a, b in path.tolist()
        )

    def stage(self, k: int, a: int, b: int, label: int) -> ChainStage:
        """There are no labels without a table."""
        raise NotImplementedError

    def tuned_bounds(self, kept: BoolArray, weights: FloatArray) -> FloatArray:
        """Bounds of some stages, ``[K, L, L+1]``, within the caps last priced, each its own."""
        modes = self.model.modes
        bound = self._by_mode.copy()
        some = kept[modes.of] & (bound < math.inf)
        bound[some] = np.maximum(
            bound[some],
            tune_arcs(
                np.argwhere(some),
                self._scalar,
                self._costs,
                self._edges,
                self.edge_scalar(weights),
                self._caps,
                modes.room,
            ),
        )
        return modes.least(bound)

    def forms(
        self, slack: FloatArray, margin: FloatArray, weights: FloatArray, caps: tuple[float, float]
    ) -> tuple[FloatArray, FloatArray]:
        """Linear forms ``[M, L, G, 5]`` and ceilings ``[M, L, G, L+1]``; see ``StageFilter``."""
        modes = self.model.modes
        # By memory alone, because caps differ between the boxes behind the slack.
        fits = self._fitting
        forms, tops = stage_forms(
            np.where(fits, slack[modes.of], -math.inf),
            np.where(fits, margin[modes.of], -math.inf),
            weights,
            self._scalar,
            self._costs,
            self._edges,
            self.edge_scalar(weights),
            np.array(caps),
            modes.room,
            self._blocked,
        )
        return forms, tops
