"""Studies of whole plans: mixtures to test the replay by, and training with what a plan beats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foreplan import errors
from foreplan.cost_models.costs import HostLaunch
from foreplan.datasets.kernels.training_programs import cast_program
from foreplan.errors import SpecError
from foreplan.planner.api import plan
from foreplan.planner.plan import Alternative, Plan, load_plan
from foreplan.planner.precision import hybrid_training, partial_plans
from foreplan.planner.precision.hybrid_training import (
    difference_table,
    emulated_losses,
    together,
)
from foreplan.planner.precision.partial_plans import WITHOUT_CASTS, FreeCasts, replay_table
from foreplan.planner.precision.spec import PrecisionWorkload
from foreplan.planner.verify.verification import CandidateResult, Machine, Verification

FIELDS = {
    "network": "byte_lm", "batch": 4, "steps": 2, "indicator": "uniform",
    "network_options": {"context": 16, "width": 32, "layers": 1, "heads": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan("precision", None, "1xa100-80g,1xt4", FIELDS, costs="roofline")


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    """A cluster of the zoo at published figures, and a workload."""
    workload = tmp_path / "workload.json"
    workload.write_text(json.dumps(FIELDS))
    return ["1xa100-80g,1xt4", str(workload), "--costs", "roofline"]


def test_casts_cost_nothing_and_other_works_are_not_answered() -> None:
    free = FreeCasts().estimate(cast_program(64, 8, "fp32", "bf16"), "anything")
    assert free is not None
    assert free.mean_s == 0.0
    assert FreeCasts().estimate(HostLaunch(1), "anything") is None


def test_mixtures_are_of_several_precisions(sources: list[str], tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    partial_plans.main(["plan", *sources, "-o", str(out), "--count", "4"])
    found = load_plan(out)
    assert [a.name for a in found.alternatives] == [f"mixture {n}" for n in (1, 2, 3, 4)]
    for alternative in found.alternatives:
        for worker in alternative.decision["workers"]:
            assert len(set(worker["operators"].values())) > 1
        cheap = alternative.predicted.metrics[WITHOUT_CASTS]
        assert 0.0 < cheap <= alternative.predicted.total_s


def test_the_replay_table_says_both_errors(made: Plan) -> None:
    metrics = {WITHOUT_CASTS: 0.9}
    predicted = made.predicted.model_copy(update={"total_s": 1.1, "metrics": metrics})
    one = Alternative(name="mixture 1", decision=made.decision, predicted=predicted)
    run = Verification(
        plan_digest=made.digest, kind="precision", backend="gloo", rounds=1, tolerance=0.1,
        machine=Machine(cpu="c", cores=1, load_before=0.0, load_after=0.0),
        candidates=(CandidateResult(name="mixture 1", role="alternative", limits_met=False,
                                    predicted_s=1.1, measured_s=1.0),),
        passed=True,
    )  # fmt: skip
    table = replay_table(made.model_copy(update={"alternatives": (one,)}), run)
    assert "| mixture 1 | 550.00 | 450.00 | 500.00 | +10.0 % | -10.0 % |" in table
    assert table.endswith("| 10.0 %, 10.0 % | 10.0 %, 10.0 % |")


def test_plans_to_train_with_take_the_same_time(sources: list[str], tmp_path: Path) -> None:
    out, losses = tmp_path / "hybrid.json", tmp_path / "losses.jsonl"
    hybrid_training.main(["plan", *sources, "-o", str(out)])
    found = load_plan(out)
    names = [a.name for a in found.alternatives]
    draws = [f"draw {number}" for number in range(3)]
    assert names == ["uniform fp32", "fastest uniform", "lowest uniform", *draws]
    limit = found.predicted.metrics["target_s"] * FIELDS["steps"] * 1.02  # type: ignore[operator]
    assert all(a.predicted.total_s <= limit for a in found.alternatives if a.name in draws)
    command = ["train", str(out), "-o", str(losses), "--steps", "10", "--seeds", "0", "1",
               "--arms", "uniform fp32", "fastest uniform@3"]  # fmt: skip
    hybrid_training.main(command)
    hybrid_training.main(command)  # what is there is not run again
    rows = [json.loads(line) for line in losses.read_text().splitlines()]
    assert [(row["seed"], row["arm"][-2:]) for row in rows] == [
        (0, "32"), (0, "@3"), (1, "32"), (1, "@3")
    ]  # fmt: skip
    assert "| fastest uniform@3 | 2 |" in difference_table(rows)


def test_every_seed_has_random_plans_of_its_own(sources: list[str], tmp_path: Path) -> None:
    out, losses = tmp_path / "hybrid.json", tmp_path / "losses.jsonl"
    hybrid_training.main(["plan", *sources, "-o", str(out), "--draws", "3"])

    def train(*seeds: str) -> None:
        words = ["--steps", "2", "--arms", "plan", "--draws-a-seed", "1", "--seeds", *seeds]
        hybrid_training.main(["train", str(out), "-o", str(losses), *words])

    train("1", "2")
    rows = [json.loads(line) for line in losses.read_text().splitlines()]
    assert [row["arm"] for row in rows] == ["plan", "draw 1", "plan", "draw 2"]
    with pytest.raises(SpecError, match="3 random plans for seeds up to 3"):
        train("3")


def test_training_in_one_process_equals_the_ranks_of_the_runtime() -> None:
    from foreplan.planner.precision.execution.decisions import uniform_decision
    from foreplan.planner.precision.execution.experiment import simulate_training
    from foreplan.planner.precision.task import training_task

    work = PrecisionWorkload.model_validate_json(json.dumps(FIELDS))
    decision = uniform_decision(training_task(None, work, 3), work, ["bf16", "int8"])
    ranks = [worker.operators for worker in decision.workers]
    ours = emulated_losses(work, ranks, steps=5, seed=3, decay=False)
    theirs = simulate_training(work, decision, steps=5, seed=3, validation_batches=48)
    assert ours["validation"] == pytest.approx(theirs.validation_loss, rel=1e-6)
    last = [rank.losses[4] for rank in theirs.ranks]
    assert ours["training"] == pytest.approx(sum(last) / 2, rel=1e-5)


def test_random_plans_of_a_seed_count_together() -> None:
    rows = [
        {"arm": arm, "seed": seed, "validation": float(loss), "training": 2.0 * loss}
        for arm, seed, loss in (
            ("plan", 0, 1),
            ("draw 0", 0, 2),
            ("draw 1", 0, 4),
            ("draw 2", 1, 5),
        )
    ]
    assert together(rows) == [
        rows[0],
        {"arm": "random plans", "seed": 0, "validation": 3.0, "training": 6.0},
        {"arm": "random plans", "seed": 1, "validation": 5.0, "training": 10.0},
    ]


def test_differences_are_paired() -> None:
    rows = [
        {"arm": arm, "seed": seed, "validation": seed + more, "training": seed + 2 * more}
        for seed in range(4)
        for arm, more in (("uniform fp32", 0.0), ("plan", 0.5 + 0.1 * (seed % 2)))
    ]
    # t(3) = 3.182; deviation 0.0577.
    assert "| plan | 4 | 2.0500 | +0.5500 ± 0.0919 | +1.1000 ± 0.1837 |" in difference_table(rows)


@pytest.mark.parametrize(
    ("text", "told"),
    [("{", "expected the losses"), ('{"arm": "plan"}\n', "lines with arm, seed, training, valid"),
     ("", "got '0 lines'")],
)  # fmt: skip
def test_a_table_of_something_else_is_refused(tmp_path, text, told):
    path = tmp_path / "losses.jsonl"
    path.write_text(text)
    with pytest.raises(SpecError, match=told):
        hybrid_training.main(["table", str(path)])
    with pytest.raises(SpecError, match="No such file"):
        hybrid_training.main(["table", str(tmp_path / "none")])


def test_a_study_ends_as_the_command_line_does(capsys):
    with pytest.raises(SystemExit) as stop, errors.told():
        raise SpecError("x", got=None, expected="y")
    assert stop.value.code == 2
    assert capsys.readouterr().err == "foreplan: error: x: got nothing, expected y\n"
