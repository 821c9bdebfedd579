"""A few of the random cases of `random_plans`; docs/results/robustness.md has the thousand."""

from __future__ import annotations

from random import Random

import pytest
from tests.robustness.random_plans import CONFIRMED, MAKERS, run

import foreplan
from foreplan.errors import InfeasibleError

CASES = {"serving": range(8), "precision": (*range(7), 17), "bubbles": (*range(12), 17)}


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_random_clusters_are_planned_or_refused(kind: str) -> None:
    outcomes = [run(kind, number) for number in CASES[kind]]
    assert "planned" in outcomes
    assert kind == "serving" or CONFIRMED in outcomes


def test_what_does_not_fit_is_said_of_every_way_tried() -> None:
    """Only encoder stages that do not divide were named; memory was the reason."""
    model, where, workload = MAKERS["bubbles"](Random("bubbles/94"))
    with pytest.raises(InfeasibleError, match=r"first stage: rank 0 .* needs .* MiB of 26\.9 MiB"):
        foreplan.plan("bubbles", model, where, workload, costs="roofline", seed=94)


@pytest.mark.parametrize("number", [31, 38, 107, 889])
def test_what_stages_of_unlike_size_alone_hold_is_planned(number: int) -> None:
    """These were refused while stages were cut by time alone."""
    assert run("bubbles", number) == "planned"
