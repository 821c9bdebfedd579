"""Connections of real processes whose order changes after every step: kept, not opened anew."""

from __future__ import annotations

from typing import Any

import bubble_cases as cases
import pytest

from foreplan.planner.bubbles.execution.entry import compare_steps, reference_step

DEEP = {"backbone": cases.BACKBONE | {"layers": 8}, "microbatches": 4}
#: Gradients are summed whole, by a collective that some orders compute beside and others do not.
REDUCED = DEEP | {"sharded_optimizer": False}
THREE_PHASES, FINE = {"fill": "three-phase"}, {"fill": "fine"}


class Run:
    """Steps of two ranks with the orders in turn; the last run also closes its trainers."""

    def __init__(
        self, fields: dict[str, Any], orders: list[dict[str, Any]], steps: int, *,
        resets: bool = True, closes: bool = False,
    ) -> None:  # fmt: skip
        self.steps, self._fields, self._ways = steps, fields, (resets, closes)
        self.problem = cases.problem(2, [cases.encoder()], **fields)
        self.decisions = [
            cases.decision(self.problem, "1f1b", ranks=2, encoder_ranks=[[[0], [1]]], **order)
            for order in orders
        ]

    def document(self) -> dict[str, Any]:
        resets, closes = self._ways
        return {
            "problem": ([2, [cases.encoder()]], self._fields), "steps": self.steps,
            "decisions": [one.model_dump(mode="json") for one in self.decisions],
            "resets": resets, "closes": closes,
        }  # fmt: skip


RUNS = {
    "alike": Run(DEEP, [THREE_PHASES, FINE, {"shuffle": 3}], 7),
    "lacking": Run(REDUCED, [THREE_PHASES, FINE, {"shuffle": 2}], 7),
    "training": Run(DEEP, [THREE_PHASES, FINE, {"shuffle": 3}], 4, resets=False),
    "training, one order": Run(DEEP, [THREE_PHASES], 4, resets=False, closes=True),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found, by run."""
    jobs = {"ranks": 2, "cases": [run.document() for run in RUNS.values()]}
    found = cases.run_ranks(jobs, tmp_path_factory.mktemp("replans"))
    return [dict(zip(RUNS, rank, strict=True)) for rank in found]


@pytest.mark.parametrize("name", ["alike", "lacking"])
def test_every_step_is_one_process_s(name: str, ranks: list[dict[str, Any]]) -> None:
    run = RUNS[name]
    orders = [decision.orders for decision in run.decisions]
    assert len(set(orders)) == len(orders)
    references = [reference_step(run.problem, d, mode="reference") for d in run.decisions]
    for step in range(run.steps):
        merged = {k: v for rank in ranks for k, v in rank[name]["results"][step].items()}
        agreed = compare_steps(merged, references[step % len(references)])
        assert agreed.passed, agreed.details
        assert agreed.exact, agreed.details
        assert agreed.details["gradient_elements"] > 10_000


def test_an_order_that_needs_nothing_new_opens_nothing(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        before, counts = rank["alike"]["before"], rank["alike"]["counts"]
        assert counts[0]["groups"] == before["groups"] + 2  # messages, and the replicas' sums
        assert counts[0]["sockets"] > before["sockets"]
        assert counts == [counts[0]] * (RUNS["alike"].steps + 1)


def test_what_was_not_there_is_opened_once(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        first, second, third, *rest = rank["lacking"]["counts"]
        assert second == first
        # A sum beside computation has a group of its own, which is never used for others.
        assert third["groups"] == second["groups"] + 1
        assert third["sockets"] > second["sockets"]
        assert rest == [third] * len(rest)
        assert len(rest) > 3


def test_weights_go_on(ranks: list[dict[str, Any]]) -> None:
    """Losses of a training that changes its order are those of one that does not."""
    ours, theirs = (
        [{k: v for rank in ranks for k, v in rank[name]["results"][step].items() if "loss" in k}
         for step in range(4)]
        for name in ("training", "training, one order")
    )  # fmt: skip
    assert ours[0]
    assert ours[0] != ours[1]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == {k: pytest.approx(v, rel=1e-5) for k, v in other.items()}


def test_a_closed_trainer_leaves_nothing_open(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        after = rank["training, one order"]["after"]
        assert (after["groups"], after["sockets"]) == (0, 0)
