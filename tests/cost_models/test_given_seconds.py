"""Seconds that a notebook gives: every form they may have, and what is said of other things."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import foreplan
from foreplan.cost_models.replayed_pass import Replay
from foreplan.errors import SpecError

STEPS = 3
EACH = [1e-6, 2e-6, 4e-6]
#: Forms of numbers, of each step.
FORMS = [list, tuple, np.array, lambda each: torch.tensor(each, dtype=torch.float64)]
NETWORK = nn.Sequential(*(nn.Linear(8, 8) for _ in range(STEPS)))


def asked(**fields: Any) -> Replay:
    given = {"inputs": (torch.zeros(4, 8),), "costs": "roofline", **fields}
    return foreplan.predict_latency(NETWORK, "t4", **given)


@pytest.mark.parametrize("form", FORMS)
def test_seconds_of_each_operator_may_be_any_sequence(form: Any) -> None:
    assert asked(launch_s=form(EACH)).host_s == pytest.approx(sum(EACH))
    # The first operator follows on no other.
    assert asked(gap_s=form(EACH), execution="graph").gap_s == pytest.approx(sum(EACH[1:]))


@pytest.mark.parametrize("form", [float, np.float64, np.array, torch.tensor])
def test_one_number_is_of_a_call(form: Any) -> None:
    assert asked(launch_s=form(2e-6)).host_s == pytest.approx(STEPS * 2e-6)
    assert asked(launch_s={"forward": form(2e-6)}).host_s == pytest.approx(STEPS * 2e-6)
    found = asked(gap_s=form(2e-6), execution="graph")
    assert found.gap_s == pytest.approx((STEPS - 1) * 2e-6)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("a", "got 'a', expected a number of seconds of at least 0, or one for each"),
        ("1e-6", "got '1e-6', expected a number of seconds"),
        (True, "got True, expected a number of seconds"),
        ([None] * STEPS, r"got \[None, .*expected a number of seconds"),
        ([[1], [1, 2]], "got 'list', expected a number of seconds"),
        (-1, r"got -1\.0, expected a number of at least 0"),
        (float("nan"), "got nan, expected a number of at least 0"),
        ([0.0, float("inf"), 0.0], r"\[1\]: got inf, expected a number of at least 0"),
        (np.full(STEPS, -1e-6), r"\[0\]: got -1e-06"),
        (np.full((STEPS, 1), 1e-6), r"got 'an array of shape \(3, 1\)'"),
        (np.full(2, 1e-6), "got '2 numbers', expected one number, or 3: one for each operator"),
        (torch.ones(STEPS, requires_grad=True), r"got 'Tensor', .*detach\(\)"),
    ],
)
def test_what_is_no_seconds_is_refused(given: Any, told: str) -> None:
    with pytest.raises(SpecError, match=f"predict_latency: launch_s.*{told}"):
        asked(launch_s=given)
    with pytest.raises(SpecError, match=f"predict_latency: gap_s.*{told}"):
        asked(gap_s=given, execution="graph")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"foward": 1e-6}, "got 'foward', expected parts of a pass: .*; did you mean forward?"),
        ({3: 1e-6}, "got 3, expected parts of a pass: forward, loss, backward, optimizer"),
        ({"forward": -1.0}, r"launch_s\['forward'\]: got -1\.0"),
        ({"forward": None}, r"launch_s\['forward'\]: got nothing"),
        ({"forward": EACH}, r"launch_s\['forward'\]: got '3 numbers', expected one number"),
        ({"forward": 1e-6}, "got 'no loss, backward, optimizer', expected seconds of every part"),
    ],
)
def test_parts_that_are_wrong_or_absent_are_named(given: Any, told: str) -> None:
    with pytest.raises(SpecError, match=told):
        asked(launch_s=given, phase="training")


def test_a_graph_takes_no_seconds_of_the_host() -> None:
    for given in (1e-6, EACH, {"forward": 1e-6}):
        with pytest.raises(SpecError, match=r"launch_s: got .* expected eager execution"):
            asked(launch_s=given, execution="graph")
