from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from foreplan.cost_models.costs import Collective, Segment
from foreplan.cost_models.schedule_builder import ScheduleBuilder
from foreplan.cost_models.timeline import Timeline
from foreplan.errors import SpecError
from foreplan.planner.plan import Plan
from foreplan.planner.prediction import RankPrediction
from foreplan.planner.registry import planner
from foreplan.planner.verify.candidates import candidates_of
from foreplan.planner.verify.error_cause import error_cause
from foreplan.planner.verify.machine_share import machine_share
from foreplan.planner.verify.rounds import Measured
from foreplan.planner.verify.scores import _phases, median_round, spearman, verification_of
from foreplan.planner.verify.session import problem_of
from foreplan.planner.verify.verification import (
    AgreementResult,
    Machine,
    Verification,
    load_verification,
)
from foreplan.planner.verify.verify import VerificationRun

MACHINE = Machine(cpu="toy", cores=2, load_before=0.1, load_after=0.2)


def measured(plan: Plan, stretch: dict[str, list[float]]) -> list[Measured]:
    """Candidates whose rounds took the predicted times, stretched."""
    chosen = planner(plan.kind)
    problem = problem_of(plan, chosen)
    found = []
    for candidate in candidates_of(plan, chosen, problem):
        item = Measured(candidate)
        count = len(candidate.schedule)
        for factor in stretch[candidate.name]:
            assert candidate.predicted is not None
            end = np.full(count, candidate.predicted.total_s * factor)
            binding = np.full(count, -1)
            item.timelines.append(
                Timeline(candidate.schedule, np.zeros(count), end, binding, "measured")
            )
        item.memory = [{"weights": 5}, {"weights": 7}]
        item.held = [50, 70]
        found.append(item)
    return found


@pytest.fixture
def document(make_plan: Callable[..., Plan]) -> Verification:
    plan = make_plan(
        alternatives={"slow": {"slow": 2.0}, "swap": {"order": [1, 0]}, "lame": {"slow": 2.0}},
        held_bytes=8,
    )
    items = measured(
        plan,
        {"chosen": [1.2, 1.0, 1.1], "slow": [1.0] * 3, "swap": [1.05] * 3, "lame": [1.0] * 3},
    )
    items[3].failure = SpecError("lame", got="nothing", expected="something")
    agreement = AgreementResult(mode="fast", passed=True, exact=False, details={"equal": 0.9})
    return verification_of(
        plan, items, [agreement], machine=MACHINE, rounds=3, tolerance=0.15, notes=("a slice",)
    )  # fmt: skip


def test_no_regret_where_nothing_else_ran(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(alternatives={"slow": {"slow": 2.0}}, held_bytes=8)
    items = measured(plan, {"chosen": [1.0], "slow": []})
    items[1].failure = SpecError("slow", got="nothing", expected="something")
    alone = verification_of(
        plan, items, [], machine=MACHINE, rounds=1, tolerance=0.15, notes=()
    )  # fmt: skip
    assert alone.regret is None
    assert "regret" not in alone.summary


def test_errors_regret_and_correlation(document: Verification) -> None:
    chosen = document.chosen
    assert chosen.predicted_s is not None
    assert chosen.measured_s == pytest.approx(1.1 * chosen.predicted_s)
    assert chosen.error == pytest.approx(0.1 / 1.1)
    assert chosen.p10_s == pytest.approx(1.02 * chosen.predicted_s)
    assert document.regret == pytest.approx(1.1 / 1.05 - 1)
    assert document.speedup["swap"] == pytest.approx(1.05 / 1.1)
    assert "lame" not in document.speedup
    assert document.candidates[3].measured_s is None
    assert document.candidates[3].failure == "lame: got 'nothing', expected something"
    assert document.rank_correlation == pytest.approx(np.sqrt(3) / 2)
    assert document.passed
    assert document.error_cause == error_cause(chosen, document.tolerance)
    assert "is work: rank " in (document.error_cause or "")
    assert document.times is not None
    rank = chosen.ranks[1]
    assert [p.op for p in rank.phases] == ["F", "end"]
    assert rank.memory[0].predicted_bytes == 8
    assert (rank.memory[0].held_bytes, rank.held_bytes) == (7, 70)


def test_a_machine_that_slowed_down_between_the_rounds(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(alternatives={"swap": {"order": [1, 0]}, "slow": {"slow": 2.0}})
    items = measured(plan, {"chosen": [1.2, 1.3, 1.4], "swap": [1.3] * 3, "slow": [1.0] * 3})
    labels = [rank.label for rank in items[0].candidate.ranks]
    items[0].pace = [dict.fromkeys(labels, pace) for pace in (1.2, 1.3, 1.4)]
    items[1].pace = [dict.fromkeys(labels, 1.0)] * 3
    items[2].pace = [{labels[0]: 1.0}] * 3  # of the other rank nothing is known
    found = verification_of(plan, items, [], machine=MACHINE, rounds=3, tolerance=0.1, notes=())
    chosen, swap, slow = found.candidates
    assert chosen.error == pytest.approx(0.3 / 1.3)
    assert chosen.error_at_pace == pytest.approx(0.0)
    assert (chosen.pace, chosen.pace_p10) == (pytest.approx(1.3), pytest.approx(1.22))
    assert [rank.pace for rank in chosen.ranks] == [1.3, 1.3]
    assert swap.pace == pytest.approx(1.0)
    assert swap.error_at_pace == pytest.approx(swap.error)
    assert (slow.pace, slow.error_at_pace) == (None, None)
    assert [rank.pace for rank in slow.ranks] == [1.0, None]
    assert not found.passed, "the tolerance is the measured error's"
    assert found.machine_share == machine_share(chosen, 0.1)
    assert "profile again" in found.summary


def test_what_exchange_takes_has_a_price_and_no_time_of_its_own(
    make_plan: Callable[..., Plan],
) -> None:
    item = measured(make_plan(), {"chosen": [1.0]})[0]
    build = ScheduleBuilder(item.candidate.schedule.devices)
    build.add("F", 0, Segment("layer"))
    build.add("beside", 0, Collective("all_gather", 100, (0, 1)))
    schedule = build.build()
    item.timelines = [Timeline(schedule, np.zeros(2), np.array([2.0, 1e-5]), np.full(2, -1), "m")]
    rank = RankPrediction(
        device="d", compute_s=2.0, communication_s=0.0, bubble_s=0.0,
        phase_s={"F": 1.0, "beside": 1.0},
    )  # fmt: skip
    both = _phases(item.timelines, 0, rank)
    assert [(p.op, p.predicted_s, p.measured_s, p.error) for p in both] == [
        ("F", 1.0, 2.0, 0.5),
        ("beside", 1.0, None, None),
    ]


def test_not_passed_beyond_the_tolerance_or_with_a_wrong_result(document: Verification) -> None:
    assert "passed" in document.summary
    wrong = AgreementResult(mode="reference", passed=False, exact=False)
    for change in ({"tolerance": 0.01}, {"agreement": (wrong,)}):
        changed = document.model_copy(update={**change, "passed": False})
        assert "NOT passed" in changed.summary


def test_the_document_is_read_back_equal(document: Verification, tmp_path: Path) -> None:
    path = tmp_path / "v.json"
    document.save(path)
    assert load_verification(path) == document
    assert "<td>swap</td>" in document._repr_html_()
    run = VerificationRun(document)
    assert str(document) == f"<Verification: {document.summary}>"
    assert repr(run) == f"<VerificationRun: {document.summary}>"
    assert run._repr_html_() == document._repr_html_()


def test_a_wrong_document_is_one_line(document: Verification, tmp_path: Path) -> None:
    path = tmp_path / "v.json"
    data = json.loads(document.to_json())
    path.write_text(json.dumps(data | {"schema": "foreplan.verification/2"}))
    with pytest.raises(SpecError, match=r"v\.json: schema: .*; use a newer foreplan"):
        load_verification(path)
    path.write_text(json.dumps(data | {"regrets": 1}))
    with pytest.raises(SpecError, match="did you mean 'regret'"):
        load_verification(path)
    path.write_text(document.to_json()[:200])
    with pytest.raises(SpecError, match="syntax error"):
        load_verification(path)


def test_spearman_and_medians(make_plan: Callable[..., Plan]) -> None:
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 1, 1], [3, 2, 1]) is None
    assert spearman([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    items = measured(make_plan(), {"chosen": [3.0, 1.0, 2.0, 5.0]})
    assert median_round(items[0].timelines) == 2
