from __future__ import annotations

import math

import numpy as np
import pytest

from foreplan.errors import SpecError
from foreplan.solvers.multiple_choice import ChoiceItem, ChoicePair, ChoiceProblem, evaluate


def product(value: float, **changes: object) -> ChoiceItem:
    """A matrix product at 8, 16 or 32 bits: loss, (time, memory), and what it hands on."""
    weights = [[2.0, 1.0], [1.0, 2.0], [4.0, 4.0]]
    given = {"values": [2 * value, value, 0.0], "weights": weights, "emits": [32, 16, 32]}
    return ChoiceItem(**{**given, **changes})  # type: ignore[arg-type]


def addition(*follows: int) -> ChoiceItem:
    return ChoiceItem(
        values=[0.0, 0.0], weights=[[1.0, 4.0], [0.5, 2.0]], emits=[32, 16], follows=follows
    )


def small(**changes: object) -> ChoiceProblem:
    """Two products, an addition of both, a pinned norm; casts cost time between unequal states."""
    norm = ChoiceItem(values=[0.0], weights=[[1.0, 1.0]], emits=[32])
    into_add = np.zeros((3, 2, 2))
    into_add[1, 0, 0] = 0.25
    into_norm = np.zeros((2, 1, 2))
    into_norm[1, 0, 0] = 0.5
    given = {
        "items": (product(3.0), product(5.0), addition(0, 1), norm),
        "pairs": (
            ChoicePair(producer=0, consumer=2, weights=into_add),
            ChoicePair(producer=1, consumer=2, weights=into_add),
            ChoicePair(producer=2, consumer=3, weights=into_norm),
        ),
        "limits": [8.0, math.inf],
        "base": [0.125, 10.0],
        "rows": ("time", "memory"),
    }
    return ChoiceProblem(**{**given, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("products", "add", "objective", "usage"),
    [
        # 8-bit products hand on 32 bits, so that the addition stays there.
        ((0, 0), 0, 16.0, (0.125 + 2 + 2 + 1 + 1, 10 + 1 + 1 + 4 + 1)),
        ((1, 1), 1, 8.0, (0.125 + 1 + 1 + 0.5 + 1 + 0.5, 10 + 2 + 2 + 2 + 1)),
        # One cast into the addition, none out of it.
        ((1, 2), 0, 3.0, (0.125 + 1 + 4 + 0.25 + 1 + 1, 10 + 2 + 4 + 4 + 1)),
    ],
)
def test_cascade_and_score(
    products: tuple[int, int], add: int, objective: float, usage: tuple[float, float]
) -> None:
    problem = small()
    choice = problem.complete((*products, 0, 0))
    assert choice == (*products, add, 0)
    score = evaluate(problem, choice)
    assert score.feasible
    assert score.objective == objective
    assert score.usage.tolist() == list(usage)


def test_violations_name_the_row() -> None:
    score = evaluate(small(limits=[4.0, 1.0]), (2, 2, 0, 0))
    assert not score.feasible
    assert score.violations[0] == "time holds 10.125, 6.125 above its limit of 4"
    assert score.violations[1].startswith("memory")


def test_more_states_than_two() -> None:
    items = [ChoiceItem(values=[0.0] * 3, emits=[0, 1, 2]) for _ in range(2)]
    follower = ChoiceItem(values=[0.0] * 2, emits=[7, 2], follows=(0, 1))
    last = ChoiceItem(values=[0.0] * 3, emits=[0, 2, 7], follows=(2,))
    problem = ChoiceProblem(items=(*items, follower, last), limits=[])
    # They agree on a state the follower has, on one it has not, and differ.
    assert problem.complete((2, 2, 0, 0)) == (2, 2, 1, 1)
    assert problem.complete((1, 1, 0, 0)) == (1, 1, 0, 2)
    assert problem.complete((1, 2, 0, 0)) == (1, 2, 0, 2)


def test_a_sum_that_should_equal_its_limit_meets_it() -> None:
    items = [ChoiceItem(values=[0.0], weights=[[0.1]]) for _ in range(3)]
    assert evaluate(ChoiceProblem(items=tuple(items), limits=[0.3]), (0, 0, 0)).feasible
    assert not evaluate(ChoiceProblem(items=tuple(items), limits=[0.2999]), (0, 0, 0)).feasible


def test_arrays_cannot_be_changed() -> None:
    values = np.array([1.0, 2.0])
    item = ChoiceItem(values=values)
    values[0] = 9.0
    assert item.values[0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        item.values[0] = 3.0


def test_left_out_weights_are_zeros_in_every_row() -> None:
    pair = ChoicePair(producer=0, consumer=1, values=np.ones((2, 1)))
    items = (ChoiceItem(values=[1.0, 2.0]), ChoiceItem(values=[0.0]))
    problem = ChoiceProblem(items=items, pairs=(pair,), limits=[1.0, 1.0], base_value=10.0)
    score = evaluate(problem, (1, 0))
    assert score.objective == 13.0
    assert score.usage.tolist() == [0.0, 0.0]


def test_without_pairs_and_with_limits() -> None:
    problem = small()
    assert evaluate(problem.without_pairs(), (1, 2, 0, 0)).usage[0] == 7.125
    assert not evaluate(problem.with_limits([7.2, 99.0]), (1, 2, 0, 0)).feasible
    assert problem.row("memory") == 1


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"values": []}, "at least one option"),
        ({"values": [[1.0]]}, "1 axis"),
        ({"values": [1.0, math.nan, 0.0]}, "finite"),
        ({"values": ["a", "b", "c"]}, "numbers"),
        ({"weights": [[1.0, 1.0]]}, r"\[3, R\]"),
        ({"emits": [1.5, 2.5, 3.5]}, "3 integers"),
        ({"emits": [1, 2]}, "3 integers"),
        ({"follows": (0,)}, "different states"),
        ({"follows": (0,), "emits": [1, 2, 3], "group": 4}, "None"),
    ],
)
def test_bad_items(changes: dict[str, object], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        product(1.0, **changes)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"limits": [1.0, math.nan]}, "limits"),
        ({"limits": [1.0], "base": [0.0], "rows": ()}, r"items\[0\].weights"),
        ({"base": [1.0]}, "base"),
        ({"base_value": math.inf}, "base_value"),
        ({"rows": ("time", "time")}, "all different"),
        ({"items": (addition(0),)}, r"items\[0\].follows"),
        ({"items": (product(1.0),)}, r"pairs\[0\]"),
        (
            {"items": (product(1.0, group=1), product(1.0, group=1, emits=[32, 16, 16]))},
            "item 0 of group 1",
        ),
        ({"pairs": (ChoicePair(producer=0, consumer=1, weights=np.zeros((2, 3, 2))),)}, "weights"),
    ],
)
def test_bad_problems(changes: dict[str, object], match: str) -> None:
    if "items" in changes and "pairs" not in match:
        changes = {"pairs": (), **changes}
    with pytest.raises(SpecError, match=match):
        small(**changes)


@pytest.mark.parametrize(
    "changes", [{"consumer": 0}, {"weights": np.zeros(3)}, {"values": np.zeros((1, 2))}, {}]
)
def test_bad_pairs(changes: dict[str, object]) -> None:
    given = {"producer": 0, "consumer": 1, **changes}
    if "values" in changes:
        given["weights"] = np.zeros((2, 2, 1))
    with pytest.raises(SpecError, match="ChoicePair"):
        ChoicePair(**given)  # type: ignore[arg-type]


def test_bad_choices() -> None:
    grouped = small(items=(product(1.0, group=0), product(1.0, group=0), *small().items[2:]))
    for problem, choice, match in (
        (small(), (0, 0, 0), "4 options"),
        (small(), (3, 0, 0, 0), r"0\.\.2"),
        (small(), (1, 1, 0, 0), "that it follows"),
        (grouped, (1, 0, 0, 0), "item 0 of its group"),
    ):
        with pytest.raises(SpecError, match=match):
            evaluate(problem, choice)
    with pytest.raises(SpecError, match="time, memory"):
        small().row("disk")
