"""Nothing that users see predicted or planned changes without being accepted; see `gate`."""

import json

import pytest
from tests.drift import gate
from tests.drift.cases import CASES, MEASURED


@pytest.mark.parametrize("name", CASES)
def test_no_prediction_and_no_plan_moved(name):
    if name == "pretrained:programs" and not MEASURED.is_dir():
        pytest.skip("the measured programs come with a checkout only")
    frozen = gate.load()
    moved = gate.drift(frozen["values"].get(name, {}), CASES[name]())
    if moved:
        pytest.fail(
            f"{gate.told(name, moved, gate.retrained(frozen))}\n{gate.ADVICE}", pytrace=False
        )


def test_nothing_is_frozen_that_is_no_case():
    assert set(gate.load()["values"]) == set(CASES)


@pytest.mark.parametrize(
    ("before", "now", "moved"),
    [
        ({"a_s": 1.0}, {"a_s": 1.0005}, []),  # another processor's rounding
        ({"a_s": 1.0}, {"a_s": 1.002}, ["a_s"]),
        ({"metrics.omega": 1.0}, {"metrics.omega": 1.01}, []),
        ({"metrics.omega": 1.0}, {"metrics.omega": 1.03}, ["metrics.omega"]),
        ({"decision.bits": [8, 8]}, {"decision.bits": [8, 4]}, ["decision.bits"]),
        ({"a_s": 1.0}, {"a_s": None}, ["a_s"]),
        ({"a_s": 1.0}, {}, ["a_s"]),
        ({}, {"a_s": 1.0}, ["a_s"]),
        ({"bound.status": "optimal"}, {"bound.status": "feasible"}, ["bound.status"]),
    ],
)
def test_what_counts_as_drift(before, now, moved):
    assert [d.what for d in gate.drift(before, now)] == moved


def test_accepting_shows_what_changed_and_then_nothing_moves(monkeypatch, tmp_path, capsys):
    values = {"plan: x": {"total_s": 1.0, "decision.bits": [8, 8]}}
    monkeypatch.setattr(gate, "FROZEN", tmp_path / "frozen.json")
    monkeypatch.setattr(gate.cases, "CASES", {"plan: x": lambda: dict(values["plan: x"])})
    monkeypatch.setattr(gate.cases, "weights", lambda: {"pretrained:ops": "new"})
    old = {"weights": {"pretrained:ops": "old"}, "values": {"plan: x": {"total_s": 2.0}}}
    gate.FROZEN.write_text(json.dumps(old))
    assert gate.main([]) == 1
    shown = capsys.readouterr().out
    assert "total_s: 2 -> 1  (-50.00 %)" in shown
    assert "pretrained:ops got other weights" in shown
    assert gate.ADVICE in shown
    assert gate.main(["--accept"]) == 0
    assert "total_s: 2 -> 1" in capsys.readouterr().out
    assert gate.main([]) == 0
    assert json.loads(gate.FROZEN.read_text())["values"] == values


def test_some_cases_can_be_accepted_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(gate, "FROZEN", tmp_path / "frozen.json")
    made = {"pretrained:ops": lambda: {"a_s": 1.0}, "plan: x": lambda: {"b_s": 1.0}}
    monkeypatch.setattr(gate.cases, "CASES", made)
    monkeypatch.setattr(gate.cases, "weights", lambda: {"pretrained:ops": "new"})
    old = {"pretrained:ops": {"a_s": 2.0}, "plan: x": {"b_s": 2.0}}
    gate.FROZEN.write_text(json.dumps({"weights": {"pretrained:ops": "old"}, "values": old}))
    assert gate.main(["--accept", "plan"]) == 0
    kept = gate.load()
    assert kept["values"] == {"pretrained:ops": {"a_s": 2.0}, "plan: x": {"b_s": 1.0}}
    assert kept["weights"] == {"pretrained:ops": "old"}
    assert gate.main(["plan"]) == 0
    assert gate.main([]) == 1
