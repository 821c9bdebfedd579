"""A planner that judges results: figures of every decision, and a reason where there are none."""

import os

import pytest

from foreplan.planner.verify.verification import load_verification
from foreplan.planner.verify.verify import verify

pytestmark = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="needs two cores for two pinned workers"
)


def test_every_decision_is_judged_and_the_document_keeps_it(make_plan, tmp_path):
    plan = make_plan(
        alternatives={"slow": {"slow": 2.0}, "unjudged": {"die": "judge"}}, tolerance=50.0,
        judged=True,
    )  # fmt: skip
    said = []
    document = verify(plan, rounds=1, progress=said.append).document
    assert document is not None
    quality = {candidate.name: candidate.quality for candidate in document.candidates}
    assert quality == {"chosen": {"slowness": 1.0}, "slow": {"slowness": 2.0}, "unjudged": {}}
    assert any("unjudged was not measured" in n and "no judge today" in n for n in document.notes)
    assert "quality of slow" in said
    document.save(tmp_path / "verification.json")
    assert load_verification(tmp_path / "verification.json") == document
