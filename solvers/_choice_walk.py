"""A choice that changes one variable at a time, with its objective and rows kept up to date."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from foreplan.solvers._choice_reduction import Reduction
from foreplan.solvers.choice_problem import FloatArray


@dataclass(frozen=True, slots=True)
class Move:
    """A step to another choice.

    Attributes:
        changes: new option of each variable that changes, derived ones included.
        objective: change of the objective.
        usage: ``[R]`` change of each row.
    """

    changes: dict[int, int]
    objective: float
    usage: FloatArray


@dataclass(slots=True)
class Walk:
    """Where a local method stands; a move costs what it touches, not the whole problem.

    Attributes:
        reduction: the variables.
        options: option of each variable.
        objective: of these options.
        usage: ``[R]`` of these options.
    """

    reduction: Reduction
    options: list[int]
    objective: float = 0.0
    usage: FloatArray = field(default_factory=lambda: np.empty(0))
    _neighbours: list[list[int]] = field(default_factory=list)
    _children: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        reduction = self.reduction
        n = len(reduction.variables)
        self._neighbours, self._children = [[] for _ in range(n)], [[] for _ in range(n)]
        for p, q in reduction.pairs:
            self._neighbours[p].append(q)
            self._neighbours[q].append(p)
        for v, variable in enumerate(reduction.variables):
            for p in variable.parents:
                self._children[p].append(v)
        self.restart(self.options)

    def restart(self, options: Sequence[int]) -> None:
        """Stand at other options and sum everything up anew."""
        reduction, self.options = self.reduction, list(options)
        reduction.derive(self.options)
        self.objective, self.usage = reduction.base_value, reduction.base.copy()
        for variable, option in zip(reduction.variables, self.options, strict=True):
            self.objective += float(variable.values[option])
            self.usage += variable.weights[option]
        for (p, q), (values, weights) in reduction.pairs.items():
            at = self.options[p], self.options[q]
            self.objective += float(values[at])
            self.usage += weights[at]

    def move(self, v: int, option: int) -> Move:
        """What it would cost to give a variable that chooses another option."""
        variables, pairs = self.reduction.variables, self.reduction.pairs
        changes = self._cascade(v, option)
        objective, usage = 0.0, np.zeros_like(self.usage)
        for u, new in changes.items():
            old = self.options[u]
            objective += float(variables[u].values[new] - variables[u].values[old])
            usage += variables[u].weights[new] - variables[u].weights[old]
            for w in self._neighbours[u]:
                if w in changes and w < u:
                    continue  # counted at w
                key, before = (u, w), (old, self.options[w])
                after = (new, changes.get(w, self.options[w]))
                if w < u:
                    key, before, after = (w, u), before[::-1], after[::-1]
                values, weights = pairs[key]
                objective += float(values[after] - values[before])
                usage += weights[after] - weights[before]
        return Move(changes, objective, usage)

    def take(self, move: Move) -> None:
        """Make a move."""
        for u, option in move.changes.items():
            self.options[u] = option
        self.objective += move.objective
        self.usage += move.usage

    def _cascade(self, v: int, option: int) -> dict[int, int]:
        """Variables that change with ``v``, parents before children."""
        before = self.options.copy()
        changes = {v: option}
        self.options[v] = option
        waiting = set(self._children[v])
        while waiting:
            u = min(waiting)
            waiting.remove(u)
            new = self.reduction.derived(u, self.options)
            if new != self.options[u]:
                changes[u] = self.options[u] = new
                waiting.update(self._children[u])
        self.options = before
        return changes
