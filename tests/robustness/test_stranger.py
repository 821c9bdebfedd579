"""A plan from a stranger: whatever sizes and words it has, verify refuses before it allocates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.robustness.guard import bounded
from tests.robustness.plan_readers import plan_text
from tests.robustness.readers import readers
from typer.testing import CliRunner

from foreplan.cli import app
from foreplan.errors import SpecError
from foreplan.planner.plan import load_plan
from foreplan.planner.registry import planner
from foreplan.planner.verify.candidates import candidates_of
from foreplan.planner.verify.session import problem_of
from foreplan.planner.verify.verify import verify

MOST = 1 << 24
READERS = readers()

#: (kind, changes by dotted path, what the line says)
ABSURD: list[tuple[str, dict[str, Any], str]] = [
    ("serving", {"workload.new_tokens": MOST}, "at most"),
    ("serving", {"workload.batch": MOST, "workload.new_tokens": MOST,
                 "decision.decode_microbatch": 1}, "at most"),
    ("serving", {"model.layers": 10**15}, "less than or equal to 10000"),
    ("serving", {"model.layers": 10**4}, "8 layers"),
    ("serving", {"decision.stages.0.rank": 9}, "expected 0..1"),
    ("serving", {"decision.prefill_microbatch": MOST}, "divisors"),
    ("serving", {"model.vocab": 10**12}, "less than or equal to 16777216"),
    ("serving", {"model.ffn": 10**12}, "less than or equal to 16777216"),
    ("serving", {"model.ffn": 2**24}, "this host has"),
    ("precision", {"workload.batch": MOST}, "at most"),
    ("precision", {"workload.steps": MOST}, "at most|actions"),
    ("precision", {"workload.network": "os.system"}, "expected one of model"),
    ("precision", {"workload.network": "../../evil.py"}, "expected one of model"),
    ("precision", {"workload.network_options": {"width": 10**9}}, "1048576"),
    ("precision", {"workload.network_options": {"__class__": "os"}}, "__class__"),
    ("bubbles", {"decision.orders.0": "e0.0-9999999F0"}, "4096 units"),
    ("bubbles", {"decision.orders.0": "e0.0-4000F0 " * 300}, "1000000 passes"),
    ("bubbles", {"workload.backbone.layers": 1 << 20}, "1048576"),
    ("bubbles", {"workload.backbone.hidden": 1 << 20}, "this host has"),
    ("bubbles", {"workload.encoders.0.model": "/dev/zero", "workload.encoders.0.dims": None},
     "vision config"),
]  # fmt: skip


def changed(kind: str, changes: dict[str, Any]) -> str:
    document = json.loads(plan_text(kind))
    for path, value in changes.items():
        *parents, last = [int(p) if p.isdigit() else p for p in path.split(".")]
        place: Any = document
        for part in parents:
            place = place[part]
        place[last] = value
    return json.dumps(document)


@pytest.fixture(scope="module", autouse=True)
def imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Import what each kind needs, outside of the bounds."""
    for kind in ("serving", "precision", "bubbles"):
        path = tmp_path_factory.mktemp("plan") / "p.json"
        path.write_text(plan_text(kind))
        verify(load_plan(path), dry_run=True)


@pytest.mark.parametrize(("kind", "changes", "said"), ABSURD, ids=lambda v: str(v)[:40])
def test_absurd_plans_are_refused(
    kind: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "p.json"
    path.write_text(changed(kind, changes))

    def ready() -> None:
        plan = load_plan(path)
        chosen = planner(plan.kind)
        # What verify does before it starts a process.
        for candidate in candidates_of(plan, chosen, problem_of(plan, chosen), only=()):
            candidate.check("gloo", None)

    with bounded(), pytest.raises(SpecError, match=said):
        ready()


@pytest.mark.parametrize("kind", ["os", "foreplan.cli:main", "../evil", "/etc/evil.py", ""])
def test_a_kind_is_a_name_of_an_installed_planner(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(changed("serving", {"kind": kind}))
    with pytest.raises(SpecError, match="kind"):
        load_plan(path)


def test_profiles_lie_below_no_absolute_path(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(changed("serving", {"cluster.devices.0.profile": "/etc/passwd"}))
    with pytest.raises(SpecError, match="relative to the cluster's file"):
        load_plan(path)


@pytest.mark.parametrize(
    ("kind", "changes", "options", "said"),
    [
        ("serving", {"cluster.devices.0.profile": "../cpu.json"}, ["--thorough"], "profile of"),
        ("serving", {"cluster.devices.0.profile": "linked/cpu.json"}, ["--thorough"], "profile of"),
        ("serving", {"workload.text": "/etc/passwd"}, [], "workload.text"),
        ("serving", {"workload.quality": "../quality.json"}, [], "workload.quality"),
        ("serving", {"provenance.costs": "helix:/etc/passwd"}, ["--thorough"], "provenance.costs"),
        ("serving", {"provenance.costs": "predicted:/etc"}, ["--thorough"], "provenance.costs"),
        ("serving", {"workload.text": "null\0byte"}, [], "workload.text"),
        ("serving", {"workload.text": "{home}/circle"}, [], "workload.text"),
    ],
)
def test_a_plan_does_not_leave_its_folder(
    kind: str, changes: dict[str, Any], options: list[str], said: str, tmp_path: Path
) -> None:
    home = tmp_path / "plan"
    home.mkdir()
    (home / "linked").symlink_to(tmp_path)
    (home / "circle").symlink_to(home / "circle")
    path = home / "plan.json"
    path.write_text(changed(kind, changes).replace("{home}", str(home)))
    command = ["verify", str(path), "--dry-run", *options]
    refused = CliRunner().invoke(app, command)
    assert isinstance(refused.exception, SpecError)
    assert said in str(refused.exception)
    assert "--trust-paths" in str(refused.exception)
    trusted = CliRunner().invoke(app, [*command, "--trust-paths"])
    assert "--trust-paths" not in str(trusted.exception)


@pytest.mark.parametrize("field", ["text", "quality"])
def test_the_api_does_not_leave_the_folder_either(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, path = tmp_path / "plan", tmp_path / "plan.json"
    home.mkdir()
    named = tmp_path / "named.json"
    named.write_text("some words")
    path.write_text(changed("serving", {f"workload.{field}": str(named)}))
    plan = load_plan(path)
    monkeypatch.chdir(home)
    with pytest.raises(SpecError, match=rf"workload\.{field}.*trust_paths=True"):
        verify(plan, dry_run=True)
    for trusting in ({"trust_paths": True}, {"folder": tmp_path}):
        assert verify(plan, dry_run=True, **trusting).processes


def test_a_rank_under_torchrun_does_not_leave_it_either(tmp_path: Path) -> None:
    home = tmp_path / "plan"
    home.mkdir()
    path = home / "plan.json"
    path.write_text(changed("serving", {"workload.text": "/etc/passwd"}))
    command = [sys.executable, "-m", "foreplan.planner.verify.worker", str(path)]
    # Ranks of another number of processes: where the paths are trusted, that is what is wrong.
    environment = {**os.environ, "RANK": "1", "WORLD_SIZE": "77"}

    def said(*more: str) -> str:
        done = subprocess.run(
            [*command, *more], env=environment, cwd=home, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == SpecError.exit_code
        (line,) = done.stderr.splitlines()
        return line

    assert "workload.text" in said()
    assert "77 processes" in said("--trust-paths")


def test_a_profile_beside_the_plan_needs_no_consent(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(changed("serving", {"cluster.devices.0.profile": "profile/none.json"}))
    result = CliRunner().invoke(app, ["verify", str(path), "--dry-run", "--thorough"])
    assert isinstance(result.exception, SpecError)
    assert "none.json" in str(result.exception), "it is looked for, and not there"


def test_a_model_folder_brings_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are safetensors, the rest plain data; ``auto_map`` and pickles are left alone."""
    import pickle

    from foreplan.datasets.graphs.causal_lm import causal_lm
    from foreplan.datasets.models.load_model import load_model

    reader = READERS["config-llama"]
    reader.attempt(tmp_path / "m", reader.valid_bytes())
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    ran = tmp_path / "ran"
    (tmp_path / "m" / "evil.py").write_text(f"open({str(ran)!r}, 'w')")
    config["auto_map"] = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))

    class Evil:
        def __reduce__(self) -> Any:
            return open, (str(ran), "w")

    (tmp_path / "m" / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    model = load_model(tmp_path / "m")
    causal_lm(model)
    with pytest.raises((OSError, SpecError)):  # no safetensors to read
        causal_lm(model.model_copy(update={"weights": "trained"}))
    assert not ran.exists()
