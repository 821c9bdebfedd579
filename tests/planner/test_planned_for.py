"""A prediction belongs to what it was made for; a plan that was edited since says so in a line."""

import json

import pytest
from typer.testing import CliRunner

import foreplan
from foreplan.cli import app
from foreplan.errors import SpecError
from foreplan.planner.plan import load_plan

WORKLOAD = {"batch": 4, "prompt_tokens": 16, "new_tokens": 4, "min_average_bits": 8}


@pytest.fixture(scope="module")
def plan():
    return foreplan.plan("serving", "tiny-llama-random", "2xt4", WORKLOAD, costs="roofline")


def _edited(plan, path, edit, *, early=False):
    document = json.loads(plan.to_json())
    edit(document)
    if early:
        del document["provenance"]["planned_for"]
    path.write_text(json.dumps(document, indent=1, sort_keys=True))  # another layout is no edit
    return path


def _batch(document):
    document["workload"]["batch"] = 8


def _link(document):
    document["cluster"]["assumptions"] = []
    document["cluster"]["tiers"][0]["bandwidth_bytes_per_s"] *= 2


def _layers(document):
    document["model"]["ffn"] *= 2


@pytest.mark.parametrize(
    ("edit", "part"), [(_batch, "workload"), (_link, "cluster"), (_layers, "model")]
)
def test_an_edited_plan_is_refused(plan, tmp_path, edit, part):
    path = _edited(plan, tmp_path / "plan.json", edit)
    with pytest.raises(SpecError, match=f"plan.json: {part}: got values edited .*; plan again"):
        load_plan(path)


@pytest.mark.parametrize(
    "command", [["verify", "--dry-run"], ["export", "--to", "torchrun", "-o", "out"], ["report"]]
)
def test_commands_refuse_it_in_a_line(plan, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    path = _edited(plan, tmp_path / "plan.json", _batch)
    result = CliRunner().invoke(app, [command[0], str(path), *command[1:]])
    assert isinstance(result.exception, SpecError)
    assert "plan again with the new ones" in str(result.exception)
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]


def test_what_the_prediction_does_not_rest_on_may_change(plan, tmp_path):
    def edit(document):
        document["verify"]["tolerance"] = 0.3
        document["alternatives"] = []
        document["workload"].pop("theta_s", None)  # at its default

    assert load_plan(_edited(plan, tmp_path / "plan.json", edit)).verify.tolerance == 0.3


def test_the_api_refuses_it_too(plan):
    edited = plan.model_copy(update={"workload": plan.workload | {"batch": 8}})
    with pytest.raises(SpecError, match="plan: workload: got values edited after planning"):
        foreplan.verify(edited, dry_run=True)


def test_a_plan_of_an_early_version_counts_its_actions(plan, tmp_path):
    early = load_plan(_edited(plan, tmp_path / "early.json", lambda document: None, early=True))
    assert foreplan.verify(early, dry_run=True).processes
    path = _edited(plan, tmp_path / "plan.json", _batch, early=True)
    if load_plan(path).decision["decode_microbatch"] == 8:
        pytest.skip("the same micro-batches")
    with pytest.raises(SpecError, match=r"workload: got values that make \d+ actions.*plan again"):
        foreplan.verify(path, dry_run=True)
