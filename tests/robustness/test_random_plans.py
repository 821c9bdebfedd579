"""A few of the random cases of `random_plans`; docs/results/robustness.md has the thousand."""

from __future__ import annotations

import pytest
from tests.robustness.random_plans import MAKERS, run

CASES = {"serving": 8, "precision": 8, "bubbles": 12}


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_random_clusters_are_planned_or_refused(kind: str) -> None:
    outcomes = [run(kind, number) for number in range(CASES[kind])]
    assert "planned" in outcomes
