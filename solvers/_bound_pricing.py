"""Stage costs without a table: the search runs first on bounds (``_stage_bound``)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from foreplan.solvers._chain_box import Box
from foreplan.solvers._chain_model import ChainModel
from foreplan.solvers._stage_bound import bound_stages, layer_minima
from foreplan.solvers._stage_forms import stage_forms, tune_arcs
from foreplan.solvers._stage_repair import meet_budgets, repair_path, tune_path
from foreplan.solvers.chain_problem import FloatArray, IntArray
from foreplan.solvers.chain_score import ChainStage, make_stage

POOL = 192
"""Multipliers kept a type: with few, tuning one stage forgets another and bounds swing."""


@dataclass(slots=True)
class BoundPricing:
    """Bounds on stages by Lagrange multipliers for their caps.

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
    _arc: FloatArray = field(init=False)
    _caps: FloatArray = field(init=False)
    _variants: IntArray = field(init=False)
    _repaired: FloatArray = field(init=False)
    _tuned: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        problem = self.model.problem
        n_types, n_layers = problem.n_types, problem.n_layers
        self._pool = np.zeros((n_types, POOL, 3))
        self._sizes = np.ones(n_types, dtype=np.int64)
        self._wins = np.zeros((n_types, POOL), dtype=np.int64)
        available = problem.available
        quantities = (problem.prefill_s, problem.decode_s, problem.memory_bytes)
        self._costs = np.stack([np.where(available, x, 0.0) for x in quantities], axis=1)
        least = np.stack([np.where(available, x, math.inf).min(axis=2) for x in quantities], 1)
        blocked = np.asarray(~available.any(axis=2))
        self._blocked = np.zeros((n_types, n_layers + 1), dtype=np.int64)
        self._blocked[:, 1:] = np.cumsum(blocked, axis=1)
        self._least = np.zeros((n_types, 3, n_layers + 1))
        self._least[:, :, 1:] = np.cumsum(np.where(blocked[:, None], 0.0, least), axis=2)
        self._edges = np.zeros((n_types, 3, 3))
        self._edges[:, 0, 2] = problem.fixed_memory_bytes
        for e, edge in enumerate(("first", "last"), start=1):
            for q, quantity in enumerate(("prefill_s", "decode_s", "memory_bytes")):
                self._edges[:, e, q] = getattr(problem, f"{edge}_{quantity}")

    def costs(self, box: Box, weights: FloatArray) -> FloatArray:
        """Bounds on all stages; see ``Pricing``, like the other methods."""
        problem = self.model.problem
        self._weights, self._scalar = weights, self.scalar(weights)
        self._minima = layer_minima(self._scalar, self._costs, self._pool, self._sizes)
        caps = np.empty((problem.n_types, 3))
        caps[:, :2] = box.high
        caps[:, 2] = problem.capacity_limit_bytes
        self._caps = caps
        self._arc = bound_stages(
            self._minima,
            self._least,
            self._blocked,
            self._edges,
            self.edge_scalar(weights),
            self._pool,
            self._sizes,
            caps,
        )
        bound: FloatArray = self._arc
        return bound

    def scalar(self, weights: FloatArray) -> FloatArray:
        """``[K, L, V]`` linear form of a layer, ``inf`` where unavailable."""
        problem = self.model.problem
        form = weights[0] * self._costs[:, 0] + weights[1] * self._costs[:, 1]
        form = form + weights[3] * problem.omega + weights[4] * problem.cost2
        return np.where(problem.available, form, math.inf)

    def edge_scalar(self, weights: FloatArray) -> FloatArray:
        """``[K, 3]`` the same form of the extras of every, the first and the last stage."""
        # An infinite extra forbids; it must not meet a zero weight.
        decode = np.where(
            np.isfinite(self._edges[:, :, 1]), self._edges[:, :, 1] * weights[1], math.inf
        )
        form: FloatArray = self._edges[:, :, 0] * weights[0] + decode
        return form

    def rows(self, path: IntArray) -> list[list[float]]:
        """What the multipliers choose on a path; it need not meet the caps."""
        problem = self.model.problem
        chosen, self._tuned, self.lift = tune_path(
            path,
            self._scalar,
            self._costs,
            problem.omega,
            problem.cost2,
            self._edges,
            self.edge_scalar(self._weights),
            self._caps,
            self._minima,
            self._arc,
            self._pool,
            self._sizes,
            self._wins,
        )
        rows: list[list[float]] = chosen.tolist()
        return rows

    def offer(self, path: IntArray) -> list[list[float]] | None:
        """The repaired stages."""
        problem = self.model.problem
        self._variants, self._repaired, fitting = repair_path(
            path,
            self._scalar,
            self._costs,
            problem.omega,
            problem.cost2,
            self._edges,
            self._caps,
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
        types = path[stage, 0]
        plain = self.scalar(np.array([1.0, self._weights[1], 0.0, problem.theta, 0.0]))
        costs = np.ascontiguousarray(self._costs[types, :, layers].transpose(1, 0, 2))
        budgeted = np.stack([problem.omega, problem.cost2])
        limits = np.array([problem.omega_limit, problem.cost2_limit])
        caps = self._caps[path[:, 0]]
        free = np.full_like(caps, math.inf)
        free[:, 2] = caps[:, 2]
        for allowed in (caps, free):
            choice, sums = self._variants.copy(), self._repaired[:, :3].copy()
            if meet_budgets(
                choice, stage, plain[types, layers], costs, sums, allowed, budgeted, limits
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

    def tuned_arcs(self, arcs: IntArray, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Multipliers ``[N, 3]`` of stages ``[N, 3]`` within the caps last priced, and bounds."""
        tuned, values = tune_arcs(
            arcs, self._scalar, self._costs, self._edges, self.edge_scalar(weights), self._caps
        )
        return tuned, values

    def forms(
        self, slack: FloatArray, margin: FloatArray, weights: FloatArray, caps: tuple[float, float]
    ) -> tuple[FloatArray, FloatArray]:
        """Linear forms ``[K, L, G, 5]`` and ceilings ``[K, L, G, L+1]``; see ``StageFilter``."""
        limit = np.empty((self.model.problem.n_types, 3))
        limit[:, :2] = caps
        limit[:, 2] = self.model.problem.capacity_limit_bytes
        forms, tops = stage_forms(
            slack,
            margin,
            weights,
            self._scalar,
            self._costs,
            self._edges,
            self.edge_scalar(weights),
            limit,
            self._blocked,
        )
        return forms, tops
