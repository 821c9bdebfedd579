"""Bounds that a plan prints: all of them, in order of strength, never above the answer."""

from __future__ import annotations

from typing import Any

import pytest
from tests.planner.bubbles.problems import encoder, problem, workload

from foreplan.planner.bubbles.bounds import MOST_UNITS, describe, proven
from foreplan.planner.bubbles.filling import Filled
from foreplan.planner.bubbles.search import BubbleSearch


def filled(**fields: Any) -> Filled:
    units = {"unit_layers": (fields.pop("unit", 1.0),)}
    layers, forward_s = fields.pop("encoder_layers", 2), fields.pop("encoder_s", 0.05)
    made = encoder(layers=layers, forward_s=forward_s, backward_s=2 * forward_s)
    asked = workload(made, **fields, **units)
    answers = BubbleSearch(problem(asked)).candidates()
    return max(answers, key=lambda one: one.solution.gap)


@pytest.mark.parametrize(("microbatches", "chunks"), [(4, 1), (4, 2), (6, 1)])
def test_every_bound_is_printed_and_none_is_passed(microbatches: int, chunks: int) -> None:
    found = filled(pp=2, chunks=chunks, layers=4, microbatches=microbatches)
    bounds, missing = proven(found)
    assert [name.split()[0] for name in bounds] == [f"LB{k}" for k in range(6)]
    assert missing == ""
    total = found.solution.objective
    assert all(0.0 < value <= total * (1 + 1e-9) for value in bounds.values())
    assert bounds["LB5 solver"] == max(bounds.values())
    assert all(name in describe(found) for name in bounds)


def test_branch_and_bound_closes_what_the_others_leave() -> None:
    found = filled(pp=2, chunks=1, layers=4, microbatches=5, transfer_s=0.02, encoder_s=0.07)
    bounds, _ = proven(found)
    others = max(value for name, value in bounds.items() if name != "LB5 solver")
    assert others < 0.999 * found.solution.objective
    assert bounds["LB5 solver"] == pytest.approx(found.solution.objective, rel=1e-3)


def test_a_bound_that_is_not_computed_says_why() -> None:
    found = filled(pp=4, layers=8, microbatches=12, unit=0.5, encoder_layers=8)
    bounds, missing = proven(found)
    if "LB5 solver" in bounds:  # the others close the gap
        assert missing == ""
    else:
        assert f"for {MOST_UNITS} at most" in missing
        assert f"not computed ({missing})" in describe(found)
