"""The multiple-choice problem with one variable for everything that is decided together.

Items that cannot differ become one variable: members of a group; a dependent and the only variable
among those it follows; dependents that follow the same variables in the same way. What only one
variable decides is summed into its own values and weights, so that a network of identical layers
shrinks to one layer, whatever its depth. Exact: every choice of the problem is one of the
reduction at the same cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from foreplan.solvers.choice_problem import Choice, ChoiceProblem, FloatArray

FIXED = -1
"""Variable of an item that cannot vary."""

Conditions = tuple[tuple[int, tuple[bool, ...]], ...]
"""Variables, each with the options that meet the condition; all have to."""


@dataclass(slots=True)
class Variable:
    """One decision.

    Attributes:
        values: ``[m]`` share of the objective that it decides alone.
        weights: ``[m, R]`` share of each row that it decides alone.
        conditions: for a variable that others decide, when each option but option 0 is taken;
            at most one of them is met. Empty for a variable that chooses.
    """

    values: FloatArray
    weights: FloatArray
    conditions: tuple[Conditions, ...] = ()

    @property
    def n_options(self) -> int:
        """``m``."""
        return len(self.values)

    @property
    def parents(self) -> tuple[int, ...]:
        """Variables that decide this one, in ascending order."""
        return tuple(sorted({p for condition in self.conditions for p, _ in condition}))


@dataclass(slots=True)
class Reduction:
    """Variables in an order in which each comes after its parents, and what pairs of them cost.

    Attributes:
        problem: the original.
        variables: the decisions.
        pairs: by ``(p, q)`` with ``p < q``: values ``[m_p, m_q]`` and weights ``[m_p, m_q, R]``.
        base_value: objective that nothing decides.
        base: ``[R]`` likewise for each row.
        images: for each item its variable (or ``FIXED``) and its option at each of that
            variable's options.
        by_roots: variable by its conditions on variables that choose (see ``_rooted``).
        roots: the same the other way round.
    """

    problem: ChoiceProblem
    variables: list[Variable] = field(default_factory=list)
    pairs: dict[tuple[int, int], tuple[FloatArray, FloatArray]] = field(default_factory=dict)
    base_value: float = 0.0
    base: FloatArray = field(default_factory=lambda: np.empty(0))
    images: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    by_roots: dict[tuple[Conditions, ...], int] = field(default_factory=dict)
    roots: dict[int, tuple[Conditions, ...]] = field(default_factory=dict)

    def choice(self, options: Sequence[int]) -> Choice:
        """Option of every item, from the option of every variable."""
        return tuple(image[0] if v == FIXED else image[options[v]] for v, image in self.images)

    def options(self, choice: Choice) -> list[int]:
        """Option of every variable, from a choice of the problem."""
        options = [0] * len(self.variables)
        for item, (v, _), option in zip(self.problem.items, self.images, choice, strict=True):
            if v != FIXED and not item.dependent:
                options[v] = option
        self.derive(options)
        return options

    def derive(self, options: list[int]) -> None:
        """Set the options of the variables that others decide."""
        for v, variable in enumerate(self.variables):
            if variable.conditions:
                options[v] = self.derived(v, options)

    def derived(self, v: int, options: Sequence[int]) -> int:
        """Option of a variable that others decide."""
        for j, condition in enumerate(self.variables[v].conditions, 1):
            if all(accepted[options[p]] for p, accepted in condition):
                return j
        return 0

    def least_value(self) -> float:
        """Bound on the objective: every variable and pair at its least."""
        singles = sum(float(variable.values.min()) for variable in self.variables)
        return self.base_value + singles + sum(float(v.min()) for v, _ in self.pairs.values())

    def scarce_rows(self) -> list[int]:
        """Rows that some choice could break; the others need no attention."""
        most = self.base.copy()
        for variable in self.variables:
            most += variable.weights.max(axis=0)
        for _, weights in self.pairs.values():
            most += weights.max(axis=(0, 1))
        # Sums in another order may differ in the last digits: half of the slack is left for that.
        half = (self.problem.limits + self.problem.slack_limits) / 2
        return [int(r) for r in np.flatnonzero(most > half)]


def reduce_problem(problem: ChoiceProblem) -> Reduction:
    """Reduce a problem to its variables."""
    reduction = Reduction(problem, base_value=problem.base_value, base=problem.base.copy())
    by_group: dict[int, int] = {}
    for i, item in enumerate(problem.items):
        if item.dependent:
            image = _dependent_image(reduction, i)
        elif item.n_options == 1:
            image = (FIXED, (0,))
        elif item.group is not None and item.group in by_group:
            image = (by_group[item.group], tuple(range(item.n_options)))
        else:
            image = (_add_variable(reduction, item.n_options), tuple(range(item.n_options)))
            if item.group is not None:
                by_group[item.group] = image[0]
        reduction.images.append(image)
    for (v, options), item in zip(reduction.images, problem.items, strict=True):
        _add_single(reduction, v, item.values[list(options)], item.weights[list(options)])
    for pair in problem.pairs:
        (p, p_options), (q, q_options) = (
            reduction.images[pair.producer],
            reduction.images[pair.consumer],
        )
        at = np.ix_(p_options, q_options)
        _add_pair(reduction, p, q, pair.values[at], pair.weights[at])
    return reduction


def _add_variable(
    reduction: Reduction, n_options: int, conditions: tuple[Conditions, ...] = ()
) -> int:
    weights = np.zeros((n_options, reduction.problem.n_rows))
    reduction.variables.append(Variable(np.zeros(n_options), weights, conditions))
    return len(reduction.variables) - 1


def _dependent_image(reduction: Reduction, i: int) -> tuple[int, tuple[int, ...]]:
    """Variable and options of a dependent item; a new variable only where no other decides."""
    item = reduction.problem.items[i]
    possible: list[tuple[Conditions, Conditions, int]] = []
    for option in range(1, item.n_options):
        condition = _condition(reduction, item.follows, int(item.emits[option]))
        rooted = None if condition is None else _rooted(reduction, condition)
        if condition is not None and rooted is not None:
            possible.append((rooted, condition, option))
    if not possible:
        return FIXED, (0,)
    if not possible[0][1]:
        return FIXED, (possible[0][2],)
    parents = {p for _, condition, _ in possible for p, _ in condition}
    if len(parents) == 1:
        parent = parents.pop()
        image = [0] * reduction.variables[parent].n_options
        for _, ((_, accepted),), option in possible:
            image = [option if here else o for o, here in zip(image, accepted, strict=True)]
        return parent, tuple(image)
    possible.sort()
    roots = tuple(rooted for rooted, _, _ in possible)
    if roots not in reduction.by_roots:
        conditions = tuple(condition for _, condition, _ in possible)
        v = _add_variable(reduction, len(conditions) + 1, conditions)
        reduction.by_roots[roots], reduction.roots[v] = v, roots
    return reduction.by_roots[roots], (0, *(option for _, _, option in possible))


def _rooted(reduction: Reduction, condition: Conditions) -> Conditions | None:
    """The same condition with derived variables replaced by theirs; ``None`` if never met.

    Along a chain of residual additions through identical layers every addition from some layer on
    depends on the same variables, which only this form shows.
    """
    accepted: dict[int, tuple[bool, ...]] = {}
    for p, mask in condition:
        rooted: Conditions = ((p, mask),)
        if p in reduction.roots and not mask[0] and sum(mask) == 1:
            rooted = reduction.roots[p][mask.index(True) - 1]
        for v, here in rooted:
            before = accepted.get(v, (True,) * len(here))
            accepted[v] = tuple(a and b for a, b in zip(before, here, strict=True))
            if not any(accepted[v]):
                return None
    return tuple(sorted(accepted.items()))


def _condition(reduction: Reduction, follows: Sequence[int], state: int) -> Conditions | None:
    """When all followed items emit a state; ``None`` if never, empty if always."""
    accepted: dict[int, tuple[bool, ...]] = {}
    for u in follows:
        v, options = reduction.images[u]
        emits = reduction.problem.items[u].emits
        here = tuple(bool(emits[option] == state) for option in options)
        if v == FIXED:
            if not here[0]:
                return None
            continue
        before = accepted.get(v, (True,) * len(here))
        accepted[v] = tuple(a and b for a, b in zip(before, here, strict=True))
        if not any(accepted[v]):
            return None
    return tuple(sorted((v, mask) for v, mask in accepted.items() if not all(mask)))


def _add_single(reduction: Reduction, v: int, values: FloatArray, weights: FloatArray) -> None:
    if v == FIXED:
        reduction.base_value += float(values[0])
        reduction.base += weights[0]
        return
    reduction.variables[v].values += values
    reduction.variables[v].weights += weights


def _add_pair(
    reduction: Reduction, p: int, q: int, values: FloatArray, weights: FloatArray
) -> None:
    if p == FIXED:
        _add_single(reduction, q, values[0], weights[0])
    elif q == FIXED:
        _add_single(reduction, p, values[:, 0], weights[:, 0])
    elif p == q:
        both = np.arange(len(values))
        _add_single(reduction, p, values[both, both], weights[both, both])
    elif p > q:
        _add_pair(reduction, q, p, values.T, weights.transpose(1, 0, 2))
    elif (p, q) in reduction.pairs:
        old_values, old_weights = reduction.pairs[p, q]
        reduction.pairs[p, q] = old_values + values, old_weights + weights
    else:
        reduction.pairs[p, q] = values, weights
