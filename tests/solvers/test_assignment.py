"""The assignment of devices to groups: brute force, bounds, limits."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.errors import SpecError
from foreplan.solvers.assignment import (
    Assignment,
    AssignmentProblem,
    GroupWorth,
    groupings,
    solve,
)
from foreplan.solvers.solution import SolutionStatus


def every_partition(kinds: Sequence[int]) -> list[list[tuple[int, ...]]]:
    """All ways to put some of a few devices into groups, as lists of groups of positions."""
    if not kinds:
        return [[]]
    found: list[list[tuple[int, ...]]] = []
    others = range(1, len(kinds))
    for size in range(len(kinds)):
        for beside in itertools.combinations(others, size):
            rest = [i for i in others if i not in beside]
            for partition in every_partition([kinds[i] for i in rest]):
                moved = [tuple(rest[i] for i in group) for group in partition]
                found.append([(0, *beside), *moved])
    # The first device may stay unused.
    for partition in every_partition(kinds[1:]):
        found.append([tuple(i + 1 for i in group) for group in partition])
    return found


class Instance:
    """Up to five devices of up to three kinds; every group has a random worth."""

    def __init__(self, seed: int, *, loose: float = 0.0, floor: bool = False) -> None:
        rng = np.random.default_rng(seed)
        self.kinds = sorted(rng.integers(0, 3, int(rng.integers(1, 6))).tolist())
        counts = [self.kinds.count(k) for k in range(3)]
        groups = groupings(counts, len(self.kinds))
        sizes = groups.sum(axis=1)
        self.value = np.where(rng.random(len(groups)) < 0.3, 0.0, rng.random(len(groups)) * sizes)
        self.bound = self.value * (1 + loose * rng.random(len(groups)))
        optimistic = self.bound + rng.random(len(groups)) * (rng.random(len(groups)) < 0.8)
        cost = rng.random(3) + 0.1
        most = 1.2 * float(self.value.max(initial=0.0))
        wanted = float(rng.random() * most) or None if floor else None
        self.problem = AssignmentProblem(
            counts=np.array(counts), groups=groups, optimistic=optimistic,
            cost=groups @ cost, floor=wanted,
        )  # fmt: skip
        self.asked: Counter[int] = Counter()

    def worth(self, group: int) -> GroupWorth:
        self.asked[group] += 1
        return GroupWorth(float(self.value[group]), float(self.bound[group]))

    def best(self) -> float:
        """Least objective over all partitions; ``inf`` where none meets the floor."""
        index = {tuple(row): g for g, row in enumerate(self.problem.groups.tolist())}
        least = math.inf
        for partition in every_partition(self.kinds):
            chosen = [
                index[tuple([self.kinds[i] for i in group].count(k) for k in range(3))]
                for group in partition
            ]
            chosen = [g for g in chosen if self.value[g] > 0]
            total = sum(float(self.value[g]) for g in chosen)
            if not chosen:
                continue
            if self.problem.floor is None:
                least = min(least, -total)
            elif total >= self.problem.floor * (1 - 1e-9):
                least = min(least, sum(float(self.problem.cost[g]) for g in chosen))
        return least


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_equals_brute_force_over_all_partitions(seed: int, floor: bool) -> None:
    made = Instance(seed, floor=floor)
    found, best = solve(made.problem, made.worth), made.best()
    if best == math.inf:
        assert found.status == SolutionStatus.INFEASIBLE
        return
    assert found.objective == pytest.approx(best, rel=1e-6, abs=1e-9)
    assert found.status == SolutionStatus.OPTIMAL
    assert found.lower_bound <= best + 1e-9
    assert found.value is not None
    assert (found.value.used(made.problem) <= made.problem.counts).all()
    assert max(made.asked.values(), default=0) <= 1


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.booleans())
def test_a_limit_or_a_loose_oracle_never_spoils_the_bound(
    seed: int, limit: int, floor: bool
) -> None:
    made = Instance(seed, loose=0.5, floor=floor)
    found, best = solve(made.problem, made.worth, max_evaluations=limit), made.best()
    assert len(made.asked) <= limit
    assert found.lower_bound <= best * (1 - 1e-9 * np.sign(best)) + 1e-9
    if found.found:
        assert found.objective >= best - 1e-9


def test_more_devices_are_never_worth_less() -> None:
    groups = groupings([4, 4], 4)
    value = 1.0 - np.exp(-0.4 * groups.sum(axis=1)) + 0.1 * groups[:, 1]
    worths = [
        -solve(
            AssignmentProblem(counts=np.array(counts), groups=groups, optimistic=value + 0.2),
            lambda g: GroupWorth(float(value[g]), float(value[g])),
        ).objective
        for counts in ([1, 0], [1, 1], [2, 1], [3, 4], [30, 41])
    ]
    assert worths == sorted(worths)


def test_a_thousand_devices_of_five_kinds_ask_few_groups() -> None:
    counts = np.array([200, 300, 150, 250, 100])
    groups = groupings(counts, 6)
    speed = np.array([1.0, 1.7, 0.6, 2.2, 4.1])
    size = groups.sum(axis=1)
    fits = groups @ np.array([16.0, 24.0, 12.0, 40.0, 80.0]) >= 60
    exact = np.where(fits, groups @ speed * (1 - 0.06 * (size - 1)), 0.0)
    asked: list[int] = []

    def worth(g: int) -> GroupWorth:
        asked.append(g)
        return GroupWorth(float(exact[g]), float(exact[g]))

    problem = AssignmentProblem(
        counts=counts, groups=groups,
        optimistic=np.where(fits, groups @ speed * (1 - 0.05 * (size - 1)), 0.0),
    )  # fmt: skip
    found = solve(problem, worth, gap=1e-3)
    assert found.gap <= 1e-3
    assert len(asked) < len(groups) / 2
    assert isinstance(found.value, Assignment)


def test_a_floor_beyond_reach_is_infeasible() -> None:
    problem = AssignmentProblem(
        counts=np.array([2]), groups=np.array([[1], [2]]), optimistic=np.array([1.0, 2.0]),
        cost=np.array([1.0, 2.0]), floor=2.5,
    )  # fmt: skip
    found = solve(problem, lambda g: GroupWorth(g + 1.0, g + 1.0))
    assert found.status == SolutionStatus.INFEASIBLE


@pytest.mark.parametrize("floor", [1e-12, 1e-3, 2.9e3, 3.1e3])
def test_a_floor_far_below_what_a_group_is_worth_is_met_at_the_least_cost(floor: float) -> None:
    """HiGHS holds a row to 1e-7: what asks for less is met by no group at all, to it."""
    problem = AssignmentProblem(
        counts=np.array([1, 1]), groups=np.array([[1, 0], [0, 1]]),
        optimistic=np.array([3e3, 5e3]), cost=np.array([0.5, 2.0]), floor=floor,
    )  # fmt: skip
    found = solve(problem, lambda g: GroupWorth((3e3, 5e3)[g], (3e3, 5e3)[g]))
    assert found.status is SolutionStatus.OPTIMAL
    assert found.value == Assignment(((0 if floor < 3e3 else 1, 1),))


def test_groupings_are_counted_before_they_are_made() -> None:
    assert groupings([2, 1], 2).tolist() == [[0, 1], [1, 0], [1, 1], [2, 0]]
    with pytest.raises(SpecError, match="fewer devices a group"):
        groupings([100] * 12, 20)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"groups": np.array([[0]])}, "empty group"),
        ({"optimistic": np.array([np.inf])}, "optimistic"),
        ({"cost": np.array([-1.0])}, "cost"),
        ({"floor": math.nan}, "floor"),
        ({"groups": np.array([[1, 1]])}, "shape"),
    ],
)
def test_a_wrong_instance_is_refused(change: dict[str, object], text: str) -> None:
    fields: dict[str, object] = {
        "counts": np.array([1]), "groups": np.array([[1]]), "optimistic": np.array([1.0])
    }  # fmt: skip
    with pytest.raises(SpecError, match=text):
        AssignmentProblem(**(fields | change))  # type: ignore[arg-type]


def test_an_oracle_that_contradicts_itself_is_refused() -> None:
    problem = AssignmentProblem(
        counts=np.array([1]), groups=np.array([[1]]), optimistic=np.array([3.0])
    )
    with pytest.raises(SpecError, match="value <= bound"):
        solve(problem, lambda g: GroupWorth(2.0, 1.0))
