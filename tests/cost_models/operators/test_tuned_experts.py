"""Fine-tuning of the experts of operators, and their mixing for unseen chips."""

from __future__ import annotations

import json
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from foreplan.cli import app
from foreplan.cost_models.operators.crossval import cross_validate, main
from foreplan.cost_models.operators.operator_experts import _weighted_median
from foreplan.cost_models.operators.operator_features import features
from foreplan.cost_models.operators.operator_predictor import OperatorPredictor
from foreplan.cost_models.operators.operator_weights import load_experts, save_tuned
from foreplan.cost_models.operators.operator_work import operator_work
from foreplan.cost_models.operators.tuned_experts import TunedExperts
from foreplan.cost_models.predictor import Predictor
from foreplan.cost_models.program_table import recorded_libraries
from foreplan.datasets.sweeps.operator_table import (
    OperatorTable,
    operator_table,
    texts,
    write_operators,
)
from foreplan.errors import SpecError

#: Launch of each host and slowness of each chip beside its roofline.
HOSTS = {"t4": (25e-6, 1.5), "l4": (27e-6, 1.6), "v100_pcie_32gb": (26e-6, 1.5),
         "a100_pcie_40gb": (60e-6, 2.4)}  # fmt: skip
STRANGER = "a100_pcie_40gb"


def table(devices: tuple[str, ...], rows: int = 250, seed: int = 0) -> OperatorTable:
    """Elementwise calls: the launch, or a multiple of the roofline where that is longer."""
    rng = np.random.default_rng(seed)
    count = rows * len(devices)
    size = {"rows": np.round(2 ** rng.uniform(0, 15, count)),
            "cols": np.round(2 ** rng.uniform(4, 13, count))}  # fmt: skip
    device = np.repeat(devices, rows)
    given = {"op": texts(["add"] * count), "kind": texts(["elementwise"] * count),
             "dtype": texts(["fp32"] * count), "library": texts(["torch-2.1-cuda"] * count),
             "device": texts(device)}  # fmt: skip
    dims = {**size, "inputs": np.full(count, 2.0), "cost": np.ones(count)}
    bare = operator_table(**given, dims=dims, latency_s=np.ones(count))
    launch = np.array([HOSTS[name][0] for name in device])
    factor = np.array([HOSTS[name][1] for name in device])
    latency = np.maximum(launch, 0.55 * launch + factor * operator_work(bare).roofline_s)
    return operator_table(**given, dims=dims, latency_s=latency)


def error(predicted: np.ndarray, truth: OperatorTable) -> float:
    return float(np.abs(predicted / truth.latency_s - 1).mean())


@pytest.fixture(scope="module")
def fold() -> OperatorPredictor:
    known = tuple(name for name in HOSTS if name != STRANGER)
    return OperatorPredictor(trees=60).fit(table(known))


def test_rows_of_the_device_help(fold: OperatorPredictor) -> None:
    asked, shown = table((STRANGER,), seed=1), table((STRANGER,), rows=64, seed=2)
    before = error(fold.predict(asked), asked)
    few = error(TunedExperts.fit(fold, shown.take(np.arange(8))).predict(asked), asked)
    many = error(TunedExperts.fit(fold, shown).predict(asked), asked)
    assert before > 0.3
    assert few < 0.5 * before
    assert many < 0.08


def test_the_host_is_found_apart_from_the_chip(fold: OperatorPredictor) -> None:
    shown = table((STRANGER,), rows=64, seed=2)
    (learnt,) = TunedExperts.fit(fold, shown).tunings_.values()
    assert learnt.adjustments["elementwise"].host == pytest.approx(np.log(60 / 26), abs=0.15)
    judged = learnt.judged["elementwise"]
    assert judged.rows == 64
    assert judged.before > 0.3
    assert judged.unseen is not None
    assert judged.unseen < 0.1


def test_other_groups_are_left_alone(fold: OperatorPredictor) -> None:
    calibrated = TunedExperts.fit(fold, table((STRANGER,), rows=8))
    others = table(("t4", "l4"), seed=3)
    assert np.array_equal(calibrated.predict(others), fold.predict(others))


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 5), st.floats(0.01, 100.0), st.integers(0, 1000))
def test_no_tuning_beats_the_bound(
    fold: OperatorPredictor, rows: int, lie: float, seed: int
) -> None:
    shown = table((STRANGER,), rows=rows, seed=seed)
    shown.latency_s[:] *= lie
    asked = table((STRANGER,), rows=50, seed=4)
    found = TunedExperts.fit(fold, shown).predict(asked)
    assert np.isfinite(found).all()
    assert (found >= features(asked, "wide").bound_s * (1 - 1e-9)).all()


def test_rows_that_nothing_is_known_of(fold: OperatorPredictor) -> None:
    shown = table((STRANGER,), rows=4)
    with pytest.raises(SpecError, match="rows to tune with"):
        TunedExperts.fit(fold, shown.take(np.arange(0)))
    with pytest.raises(SpecError, match=r"device h2000 is not in the zoo; --device-file takes"):
        TunedExperts.fit(fold, replace(shown, device=texts(["h2000"] * len(shown)), devices={}))


def test_trees_are_kept_where_unseen_rows_are_better_with_them(fold: OperatorPredictor) -> None:
    """A step that no slope follows: long kernels of narrow rows take 1.8 times as long."""

    def stepped(rows: int, seed: int) -> OperatorTable:
        found = table((STRANGER,), rows=rows, seed=seed)
        slow = (found.dims["cols"] < 1500) & (found.latency_s > 3 * HOSTS[STRANGER][0])
        return replace(found, latency_s=found.latency_s * np.where(slow, 1.8, 1.0))

    asked = stepped(800, 7)
    asked = asked.take(asked.latency_s > 3 * HOSTS[STRANGER][0])
    (plain,) = TunedExperts.fit(fold, stepped(60, 6)).tunings_.values()
    tuned = TunedExperts.fit(fold, stepped(400, 6))
    (grown,) = tuned.tunings_.values()
    assert plain.trees is None, "too few rows"
    assert grown.trees is not None
    without = copy(tuned)
    without.tunings_ = {grown.key: replace(grown, trees=None)}
    assert error(tuned.predict(asked), asked) < 0.8 * error(without.predict(asked), asked)


def test_a_kind_that_tuning_makes_no_better_stays_as_it_was(fold: OperatorPredictor) -> None:
    """Labels that are noise about what the experts say."""
    shown = table(("t4",), rows=100, seed=3)
    noise = np.exp(np.random.default_rng(0).normal(0, 0.2, len(shown)))
    shown = replace(shown, latency_s=fold.predict(shown) * noise)
    tuned = TunedExperts.fit(fold, shown)
    (learnt,) = tuned.tunings_.values()
    assert not learnt.adjustments
    assert learnt.judged["elementwise"].before == learnt.judged["elementwise"].unseen
    asked = table(("t4",), seed=4)
    for before, after in zip(
        fold.predict_interval(asked), tuned.predict_interval(asked), strict=True
    ):
        assert np.array_equal(before, after)


def test_the_interval_covers_rows_that_were_not_shown(fold: OperatorPredictor) -> None:
    def noisy(rows: int, seed: int) -> OperatorTable:
        found = table((STRANGER,), rows=rows, seed=seed)
        noise = np.random.default_rng(seed).normal(0, 0.15, len(found))
        return replace(found, latency_s=found.latency_s * np.exp(noise))

    asked = noisy(400, 9)
    mean, low, high = TunedExperts.fit(fold, noisy(200, 8)).predict_interval(asked)
    inside = (low <= asked.latency_s) & (asked.latency_s <= high)
    assert (low < mean).all()
    assert 0.85 <= inside.mean() <= 0.97


def test_tuned_experts_come_back_from_disk(fold: OperatorPredictor, tmp_path: Path) -> None:
    fold.save(tmp_path / "start")
    tuned = TunedExperts.fit(
        load_experts(tmp_path / "start"), table((STRANGER, "l4"), rows=120, seed=6)
    )
    card = save_tuned(tuned, tmp_path / "start", tmp_path / "mine", {"sources": [{"file": "x"}]})
    again = load_experts(tmp_path / "mine")
    assert isinstance(again, TunedExperts)
    asked = table(tuple(HOSTS), rows=50, seed=5)
    # Leaves are kept in half precision.
    for one, two in zip(tuned.predict_interval(asked), again.predict_interval(asked), strict=True):
        assert two == pytest.approx(one, rel=2e-3)
    assert [t["device"]["name"] for t in card["tunings"]] == ["a100_pcie_40gb", "l4"]  # type: ignore[attr-defined]
    assert Predictor.load(str(tmp_path / "mine")).model.experts_
    assert type(again.without({"none"})).__name__ == "FittedExperts"
    with pytest.raises(SpecError, match=r"read fine-tuned experts with foreplan\.Predictor\.load"):
        OperatorPredictor.load(tmp_path / "mine")
    broken = json.loads((tmp_path / "mine" / "card.json").read_text())
    broken["tunings"][0]["kinds"]["elementwise"]["host"] = "fast"
    (tmp_path / "mine" / "card.json").write_text(json.dumps(broken))
    with pytest.raises(SpecError, match="weights that fit the card"):
        load_experts(tmp_path / "mine")


def test_rows_of_a_device_under_two_names_teach_together(fold: OperatorPredictor) -> None:
    shown = table((STRANGER,), rows=64, seed=6)
    other = ["NVIDIA A100-PCIE-40GB", STRANGER]
    mixed = replace(shown, device=texts(other[n % 2] for n in range(len(shown))))
    (learnt,) = TunedExperts.fit(fold, mixed).tunings_.values()
    assert learnt.judged["elementwise"].rows == 64
    asked = table((STRANGER,), seed=5)
    tuned = [TunedExperts.fit(fold, one).predict(asked) for one in (shown, mixed)]
    assert np.array_equal(*tuned)


def test_rows_inside_graphs_are_asked_for_by_their_library(fold: OperatorPredictor) -> None:
    shown = table((STRANGER,), rows=64, seed=6)
    inside = replace(shown, library=texts(["torch_graph-2.11-cuda"] * len(shown)))
    tuned = TunedExperts.fit(fold, inside)
    device = shown.device_of(STRANGER)
    assert device is not None
    assert recorded_libraries(fold, device) == {}
    assert recorded_libraries(tuned, device) == {("elementwise", "fp32"): "torch_graph-2.11-cuda"}


def test_the_command_tunes_and_says_what_it_was_worth(
    fold: OperatorPredictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    fold.save(tmp_path / "start")
    rows = tmp_path / "rows.parquet"
    write_operators(table((STRANGER,), rows=100, seed=6), rows)
    train = ["train", "--data", str(rows), "--start"]
    run = CliRunner().invoke(app, [*train, str(tmp_path / "start"), "-o", str(tmp_path / "mine")])
    assert run.exit_code == 0, run.output
    assert "a100_pcie_40gb elementwise fp32" in run.output
    asked = tmp_path / "asked.parquet"
    write_operators(table((STRANGER,), seed=5), asked)
    errors = []
    for name in ("start", "mine"):
        said = CliRunner().invoke(
            app, ["evaluate", "-m", str(tmp_path / name), "--data", str(asked), "--json"]
        )
        errors.append(json.loads(said.output)["overall"]["mape"])
    assert errors[1] < 0.5 * errors[0]
    again = CliRunner().invoke(app, [*train, str(tmp_path / "mine"), "-o", str(tmp_path / "more")])
    assert isinstance(again.exception, SpecError)
    assert "a model that was not fine-tuned" in str(again.exception)
    assert not (tmp_path / "more").exists()


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0.01, 5)), min_size=1, max_size=7))
def test_weighted_median(pairs: list[tuple[float, float]]) -> None:
    values, weights = np.array(pairs).T
    found = _weighted_median(values[None], weights)[0]
    total = weights.sum()
    assert found in values
    assert weights[values <= found].sum() >= 0.5 * total - 1e-9
    assert weights[values >= found].sum() >= 0.5 * total - 1e-9


def test_folds_report_errors_after_tuning_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    everything = table(tuple(HOSTS), rows=120)
    result = cross_validate(everything, seeds=[0], tune=[1, 64, 0.2], score_rows=200)
    cells = result["cells"]
    assert isinstance(cells, dict)
    mape = cells[f"{STRANGER}|elementwise|fp32"]["mape"]
    few = [f"foreplan, {rows}" for rows in ("1 rows", "64 rows", "20% of rows")]
    assert list(mape) == ["foreplan", *few]
    assert mape["foreplan, 64 rows"] < 0.5 * mape["foreplan"]
    assert mape["foreplan, 20% of rows"] < 0.5 * mape["foreplan"]
    chips = result["chips"]
    assert isinstance(chips, dict)
    assert chips["ga100"]["mape"] == pytest.approx(mape)
    path = tmp_path / "rows.parquet"
    write_operators(everything, path)
    main(["--data", str(path), "--format", "foreplan", "--seeds", "0", "--tune", "8",
          "--score-rows", "200"])  # fmt: skip
    assert set(json.loads(capsys.readouterr().out)["cells"]) == set(cells)
