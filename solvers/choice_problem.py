"""The multiple-choice problem: items choose one option each, under linear budgets.

Shape legend: ``N`` items, ``R`` budget rows, ``m_i`` options of item ``i``.

With ``c_i`` the option of item ``i``, ``v`` and ``w`` values and weights, and pairs ``(u, i)``::

    minimise    sum_i v_i[c_i] + sum_(u,i) v_ui[c_u, c_i]
    subject to  base_r + sum_i w_i[c_i, r] + sum_(u,i) w_ui[c_u, c_i, r] <= limit_r   for each row r

Pairs are what two neighbours cost together: a conversion where an item's option does not fit its
producer's. Some items do not choose:

- an item with one option is *pinned*;
- an item that *follows* others is *dependent*: it takes the option that emits the state which all
  of them emit, and option 0 where they differ or where no option emits that state. With two
  states and ``emits = (high, low)`` it is low if and only if all that it follows are low.
- items with the same *group* take the same option.

Example: operators choose a precision of 8, 16 or 32 bits. Options list them in this order, an 8-bit
kernel hands on 32-bit results, so a matrix product emits ``(32, 16, 32)``; an addition that follows
two products has the options 32 and 16 and emits ``(32, 16)``; pairs hold the time of casts; rows
are memory and the time until each gradient bucket is ready.

Source: the precision problem of QSync (arXiv 2407.02327) with the cascade of its released code;
the exact form with all casts and buckets as rows is our own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from foreplan.errors import SpecError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

Choice = tuple[int, ...]
"""Option of every item, pinned and dependent ones included."""

RELATIVE_TOLERANCE = 1e-9
"""Slack on every limit in units of its row, so that a sum that should equal its limit meets it."""


def _unset() -> FloatArray:
    return np.empty(0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChoiceItem:
    """One item and its options; arrays are copied, checked and made read-only.

    Attributes:
        values: ``[m]`` contribution of each option to the objective, any sign.
        weights: ``[m, R]`` contribution of each option to each row, any sign; left out: zeros.
        emits: ``[m]`` state that each option hands on to items that follow; left out: the option's
            own index. Options of a dependent item emit different states.
        follows: indices of the items whose common state decides this one's option, each smaller
            than this item's own index; empty for an item that chooses.
        group: items with the same number take the same option; ``None`` for an item of its own.
            Members have the same number of options and emit the same; a dependent has no group.
        label: name in messages.

    Raises:
        SpecError: no options, a wrong shape, a number that is not finite, states that are no
            integers, a dependent item with a group or with two options that emit the same.
    """

    values: FloatArray
    weights: FloatArray = field(default_factory=_unset)
    emits: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    follows: tuple[int, ...] = ()
    group: int | None = None
    label: str = ""

    def __post_init__(self) -> None:
        where = f"ChoiceItem({self.label})" if self.label else "ChoiceItem"
        values = _numbers(f"{where}.values", self.values, 1)
        m = len(values)
        if m == 0:
            raise SpecError(f"{where}.values", got=(), expected="at least one option")
        weights = _numbers(f"{where}.weights", self.weights, None)
        if weights.size == 0:
            weights = np.zeros((m, weights.shape[1] if weights.ndim == 2 else 0))
        if weights.ndim != 2 or len(weights) != m:
            raise SpecError(f"{where}.weights", got=weights.shape, expected=f"shape [{m}, R]")
        emits = np.asarray(self.emits)
        if emits.size == 0:
            emits = np.arange(m)
        if emits.shape != (m,) or not np.issubdtype(emits.dtype, np.integer):
            raise SpecError(f"{where}.emits", got=self.emits, expected=f"{m} integers")
        if self.follows and len(set(emits.tolist())) != m:
            raise SpecError(
                f"{where}.emits", got=emits.tolist(), expected="different states, as it follows"
            )
        if self.follows and self.group is not None:
            raise SpecError(
                f"{where}.group", got=self.group, expected="None, as the item follows others"
            )
        _freeze(self, "values", values)
        _freeze(self, "weights", weights)
        _freeze(self, "emits", emits.astype(np.int64))
        object.__setattr__(self, "follows", tuple(int(u) for u in self.follows))

    @property
    def n_options(self) -> int:
        """``m``."""
        return len(self.values)

    @property
    def dependent(self) -> bool:
        """Whether other items decide this one's option."""
        return bool(self.follows)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChoicePair:
    """What two items cost together; arrays are copied, checked and made read-only.

    Attributes:
        producer: index of the item whose option is the first axis.
        consumer: index of the item whose option is the second axis; not the producer.
        weights: ``[m_producer, m_consumer, R]`` contribution to each row, any sign; left out:
            zeros.
        values: ``[m_producer, m_consumer]`` contribution to the objective; left out: zeros.

    Several pairs of the same two items add up.

    Raises:
        SpecError: a wrong shape, a number that is not finite, an item paired with itself.
    """

    producer: int
    consumer: int
    weights: FloatArray = field(default_factory=_unset)
    values: FloatArray = field(default_factory=_unset)

    def __post_init__(self) -> None:
        where = f"ChoicePair({self.producer}, {self.consumer})"
        if self.producer == self.consumer:
            raise SpecError(where, got=self.producer, expected="two different items")
        weights = _numbers(f"{where}.weights", self.weights, None)
        values = _numbers(f"{where}.values", self.values, None)
        if weights.size == 0 and weights.ndim != 3:
            weights = np.zeros((*values.shape, 0))
        if values.size == 0:
            values = np.zeros(weights.shape[:2])
        if weights.ndim != 3 or values.shape != weights.shape[:2]:
            raise SpecError(
                f"{where}.weights",
                got=(weights.shape, values.shape),
                expected="shapes [a, b, R] and [a, b] of weights and values",
            )
        _freeze(self, "weights", weights)
        _freeze(self, "values", values)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChoiceProblem:
    """One instance.

    Attributes:
        items: in an order in which every item comes after those that it follows.
        limits: ``[R]`` most that each row may hold; ``inf`` for a row that is only reported.
        pairs: costs of two items together.
        base: ``[R]`` what each row holds before anything is chosen; left out: zeros.
        base_value: objective before anything is chosen.
        rows: name of each row for messages; left out: ``row 0``, ``row 1``...
        row_units: ``[R]`` size of the largest number in each row, above 0 (computed).
        slack_limits: ``[R]`` limits with the float slack that every method shares (computed).

    Items and pairs whose weights were left out get zeros in every row.

    Raises:
        SpecError: shapes that disagree, an item that follows a later one, a pair of items that do
            not exist, unequal members of a group, a limit that is NaN or minus infinity.
    """

    items: tuple[ChoiceItem, ...]
    limits: FloatArray
    pairs: tuple[ChoicePair, ...] = ()
    base: FloatArray = field(default_factory=_unset)
    base_value: float = 0.0
    rows: tuple[str, ...] = ()
    row_units: FloatArray = field(init=False)
    slack_limits: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        limits = np.array(self.limits, dtype=np.float64)
        if limits.ndim != 1 or np.isnan(limits).any() or (limits == -math.inf).any():
            raise SpecError("ChoiceProblem.limits", got=self.limits, expected="[R], finite or inf")
        n_rows = len(limits)
        base = _numbers("ChoiceProblem.base", self.base, 1)
        base = base if base.size else np.zeros(n_rows)
        if len(base) != n_rows:
            raise SpecError("ChoiceProblem.base", got=base.shape, expected=f"shape [{n_rows}]")
        if not math.isfinite(self.base_value):
            raise SpecError("ChoiceProblem.base_value", got=self.base_value, expected="finite")
        rows = tuple(self.rows) or tuple(f"row {r}" for r in range(n_rows))
        if len(rows) != n_rows or len(set(rows)) != n_rows:
            raise SpecError(
                "ChoiceProblem.rows", got=rows, expected=f"{n_rows} names, all different"
            )
        _freeze(self, "limits", limits)
        _freeze(self, "base", base)
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "items", tuple(map(self._fitted_item, range(len(self.items)))))
        object.__setattr__(self, "pairs", tuple(map(self._fitted_pair, range(len(self.pairs)))))
        self._check_groups()
        _freeze(self, "row_units", self._units())
        _freeze(self, "slack_limits", self.limits + RELATIVE_TOLERANCE * self.row_units)

    def _fitted_item(self, i: int) -> ChoiceItem:
        """Item ``i`` with weights for every row."""
        item = self.items[i]
        if not all(0 <= u < i for u in item.follows):
            raise SpecError(
                f"ChoiceProblem.items[{i}].follows",
                got=item.follows,
                expected=f"earlier items, 0..{i - 1}",
            )
        if item.weights.shape[1] == self.n_rows:
            return item
        if item.weights.size:
            raise SpecError(
                f"ChoiceProblem.items[{i}].weights",
                got=item.weights.shape,
                expected=f"shape [{item.n_options}, {self.n_rows}]",
            )
        return replace(item, weights=np.zeros((item.n_options, self.n_rows)))

    def _fitted_pair(self, e: int) -> ChoicePair:
        """Pair ``e`` with weights for every row."""
        pair, n = self.pairs[e], len(self.items)
        if not (0 <= pair.producer < n and 0 <= pair.consumer < n):
            raise SpecError(
                f"ChoiceProblem.pairs[{e}]",
                got=(pair.producer, pair.consumer),
                expected=f"items 0..{n - 1}",
            )
        options = (self.items[pair.producer].n_options, self.items[pair.consumer].n_options)
        weights = pair.weights
        if weights.size == 0 and weights.shape[2] == 0:
            weights = np.zeros((*weights.shape[:2], self.n_rows))
        if weights.shape != (*options, self.n_rows):
            raise SpecError(
                f"ChoiceProblem.pairs[{e}].weights",
                got=pair.weights.shape,
                expected=f"shape {[*options, self.n_rows]}",
            )
        return pair if weights is pair.weights else replace(pair, weights=weights)

    def _check_groups(self) -> None:
        first: dict[int, int] = {}
        for i, item in enumerate(self.items):
            if item.group is None:
                continue
            j = first.setdefault(item.group, i)
            if not np.array_equal(self.items[j].emits, item.emits):
                raise SpecError(
                    f"ChoiceProblem.items[{i}].emits",
                    got=item.emits.tolist(),
                    expected=f"{self.items[j].emits.tolist()}, as item {j} of group {item.group}",
                )

    @property
    def n_items(self) -> int:
        """``N``."""
        return len(self.items)

    @property
    def n_rows(self) -> int:
        """``R``."""
        return len(self.limits)

    def _units(self) -> FloatArray:
        unit = np.abs(self.base)
        unit = np.maximum(unit, np.where(np.isfinite(self.limits), np.abs(self.limits), 0.0))
        for item in self.items:
            unit = np.maximum(unit, np.abs(item.weights).max(axis=0))
        for pair in self.pairs:
            unit = np.maximum(unit, np.abs(pair.weights).max(axis=(0, 1)))
        return np.where(unit > 0, unit, 1.0)

    def row(self, name: str) -> int:
        """Index of a row by its name.

        Raises:
            SpecError: no row has this name.
        """
        if name not in self.rows:
            raise SpecError("row", got=name, expected=f"one of {', '.join(self.rows)}")
        return self.rows.index(name)

    def with_limits(self, limits: npt.ArrayLike) -> ChoiceProblem:
        """Same problem with other limits ``[R]``."""
        return replace(self, limits=np.asarray(limits, dtype=np.float64))

    def without_pairs(self) -> ChoiceProblem:
        """Relaxation in which neighbours cost nothing together: plain multiple-choice knapsack.

        With costs of pairs at least 0 its optimum is a lower bound. A choice that it finds may
        break the rows of the problem itself: judge it with :func:`evaluate` of that.
        """
        return replace(self, pairs=())

    def complete(self, choice: Sequence[int]) -> Choice:
        """Overwrite the entries of dependent items by what the cascade makes of the others.

        Args:
            choice: ``[N]`` options; entries of dependent items are ignored.

        Raises:
            SpecError: a wrong length, an option that does not exist, a group that disagrees.
        """
        given = self._checked(choice)
        emitted: list[int] = []
        chosen: list[int] = []
        for i, item in enumerate(self.items):
            option = given[i]
            if item.dependent:
                states = {emitted[u] for u in item.follows}
                agreed = states.pop() if len(states) == 1 else None
                option = next((j for j, s in enumerate(item.emits.tolist()) if s == agreed), 0)
            chosen.append(option)
            emitted.append(int(item.emits[option]))
        return tuple(chosen)

    def _checked(self, choice: Sequence[int]) -> list[int]:
        if len(choice) != self.n_items:
            raise SpecError("choice", got=len(choice), expected=f"{self.n_items} options")
        given = [int(option) for option in choice]
        first: dict[int, int] = {}
        for i, item in enumerate(self.items):
            if item.dependent:
                continue
            if not 0 <= given[i] < item.n_options:
                raise SpecError(
                    f"choice[{i}]", got=given[i], expected=f"an option 0..{item.n_options - 1}"
                )
            if item.group is None:
                continue
            j = first.setdefault(item.group, i)
            if given[i] != given[j]:
                raise SpecError(
                    f"choice[{i}]", got=given[i], expected=f"{given[j]}, as item {j} of its group"
                )
        return given


def _numbers(where: str, given: object, ndim: int | None) -> FloatArray:
    """A float64 copy of finite numbers, with ``ndim`` axes if that is given."""
    try:
        array = np.array(given, dtype=np.float64, order="C")
    except (TypeError, ValueError) as error:
        raise SpecError(where, got=given, expected="numbers") from error
    if ndim is not None and array.ndim != ndim:
        raise SpecError(where, got=array.shape, expected=f"{ndim} axis" + "es" * (ndim > 1))
    if not np.isfinite(array).all():
        raise SpecError(where, got="NaN or inf", expected="finite numbers")
    return array


def _freeze(record: object, name: str, array: npt.NDArray[np.float64] | IntArray) -> None:
    array.setflags(write=False)
    object.__setattr__(record, name, array)
