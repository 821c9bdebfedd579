"""Every path of a plan starts from the plan's own folder, wherever it is read and moved to."""

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import foreplan
from foreplan.cli import app
from foreplan.datasets.models.model_zoo import zoo_model
from foreplan.errors import SpecError
from foreplan.planner.plan import load_plan

PROFILES = Path(__file__).parents[1] / "benchmarks" / "profiles"
WORKLOAD = "batch=4,prompt_tokens=16,new_tokens=4,min_average_bits=8"


@pytest.fixture
def job(tmp_path):
    """A folder with a model and profiles, as a user has it."""
    home = tmp_path / "job"
    shutil.copytree(PROFILES, home / "profiles")
    model = zoo_model("demo-llama-random")
    (home / "model").mkdir()
    (home / "out").mkdir()
    config = {
        "model_type": "llama", "num_hidden_layers": model.layers, "hidden_size": model.hidden,
        "num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads,
        "intermediate_size": model.ffn, "vocab_size": model.vocab, "max_position_embeddings": 512,
        "torch_dtype": "float32",
    }  # fmt: skip
    (home / "model" / "config.json").write_text(json.dumps(config))
    return home


def _plan(*more):
    command = [
        "plan", "serving", "-m", "model", "-c", "profiles/cluster.yaml", "-w", WORKLOAD, *more
    ]  # fmt: skip
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.exception


def _paths(plan):
    return {
        Path(plan.model.path).resolve(),
        *(Path(rank.profile).resolve() for rank in plan.cluster.ranks()),
    }


def test_paths_start_from_the_plans_folder(job, tmp_path, monkeypatch):
    monkeypatch.chdir(job)
    _plan("-o", "out/plan.json")
    document = json.loads((job / "out" / "plan.json").read_text())
    assert document["model"]["path"] == "../model"
    assert document["cluster"]["devices"][0]["profile"].startswith("../profiles/")
    wanted = _paths(load_plan("out/plan.json"))
    assert wanted == {job / "model", *(job / "profiles").glob("cpu-*1*.json")}
    digest = load_plan("out/plan.json").digest
    # From another folder, by another name of its own, and moved.
    monkeypatch.chdir(tmp_path)
    assert _paths(load_plan("job/out/plan.json")) == wanted
    (tmp_path / "link").symlink_to(job / "out")
    assert _paths(load_plan("link/plan.json")) == wanted
    job.rename(tmp_path / "moved")
    moved = load_plan("moved/out/plan.json")
    assert all(path.exists() for path in _paths(moved))
    assert moved.digest == digest
    copy = tmp_path / "elsewhere" / "deep"
    copy.mkdir(parents=True)
    moved.save(copy / "plan.json")
    assert _paths(load_plan(copy / "plan.json")) == _paths(moved)
    assert load_plan(copy / "plan.json").digest == digest


def test_what_lies_below_the_plan_goes_with_it(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = str(job / "model")
    made = foreplan.plan("serving", model, "2xt4", WORKLOAD, costs="roofline")
    made.save(job / "plan.json")
    assert json.loads((job / "plan.json").read_text())["model"]["path"] == "model"
    made.save(tmp_path / "else.json")
    assert json.loads((tmp_path / "else.json").read_text())["model"]["path"] == "job/model"


def test_the_api_writes_profiles_from_the_plans_folder(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = foreplan.plan("serving", "demo-llama-random", "job/profiles/cluster.yaml", WORKLOAD)
    made.save("plan.json")
    assert load_plan("plan.json") == made
    assert all(Path(rank.profile).exists() for rank in made.cluster.ranks())


def test_a_missing_model_says_where_it_was_looked_for(job, monkeypatch):
    monkeypatch.chdir(job)
    _plan("-o", "plan.json")
    shutil.rmtree(job / "model")
    with pytest.raises(SpecError, match=rf"looked for as {job}/model; .*the plan's folder"):
        foreplan.verify("plan.json")


def test_a_plan_of_an_early_version_is_read_as_it_was(job, tmp_path, monkeypatch):
    monkeypatch.chdir(job)
    _plan("-o", "out/plan.json")
    document = json.loads((job / "out" / "plan.json").read_text())
    del document["provenance"]["planned_for"]
    document["model"]["path"] = "model"  # from the current folder; profiles from the plan's
    path = job / "out" / "early.json"
    path.write_text(json.dumps(document))
    early = load_plan(path)
    assert _paths(early) == {job / "model", *(job / "profiles").glob("cpu-*1*.json")}
    early.save(tmp_path / "again.json")
    again = json.loads((tmp_path / "again.json").read_text())
    assert again["model"]["path"] == "model"
    digest = early.digest
    monkeypatch.chdir(tmp_path)
    assert load_plan(path).digest == digest
    with pytest.raises(SpecError, match="the current folder"):
        foreplan.verify(path)


def test_a_link_is_to_its_file_and_a_pipe_lies_nowhere(job, tmp_path, monkeypatch):
    monkeypatch.chdir(job)
    _plan("-o", "out/plan.json")
    wanted = _paths(load_plan("out/plan.json"))
    (tmp_path / "link.json").symlink_to(job / "out" / "plan.json")
    assert _paths(load_plan(tmp_path / "link.json")) == wanted
    made = foreplan.plan("serving", "model", "2xt4", WORKLOAD, costs="roofline")
    read, write = os.pipe()
    os.write(write, made.to_json().encode()[:60_000])
    os.close(write)
    assert load_plan(f"/dev/fd/{read}").model.path == "model"
    os.close(read)


def test_an_export_finds_the_model_from_its_own_folder(job, monkeypatch):
    monkeypatch.chdir(job)
    _plan("-o", "plan.json")
    foreplan.export_plan("plan.json", "torchrun", "launch/here")
    assert _paths(load_plan("launch/here/plan.json")) == _paths(load_plan("plan.json"))
