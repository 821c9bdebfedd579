"""Few-shot calibration of the operator predictor, and the mixing of experts for unseen chips."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.cost_models.operators.crossval import cross_validate, main
from foreplan.cost_models.operators.operator_calibration import CalibratedPredictor
from foreplan.cost_models.operators.operator_experts import _weighted_median
from foreplan.cost_models.operators.operator_features import features
from foreplan.cost_models.operators.operator_predictor import OperatorPredictor
from foreplan.cost_models.operators.operator_work import operator_work
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
    few = error(CalibratedPredictor(fold).fit(shown.take(np.arange(8))).predict(asked), asked)
    many = error(CalibratedPredictor(fold).fit(shown).predict(asked), asked)
    assert before > 0.3
    assert few < 0.5 * before
    assert many < 0.08


def test_the_host_is_found_apart_from_the_chip(fold: OperatorPredictor) -> None:
    shown = table((STRANGER,), rows=64, seed=2)
    (learnt,) = CalibratedPredictor(fold).fit(shown).adjustments_.values()
    assert learnt.host == pytest.approx(np.log(60 / 26), abs=0.15)
    assert learnt.rows == 64


def test_other_groups_are_left_alone(fold: OperatorPredictor) -> None:
    calibrated = CalibratedPredictor(fold).fit(table((STRANGER,), rows=8))
    others = table(("t4", "l4"), seed=3)
    assert np.array_equal(calibrated.predict(others), fold.predict(others))


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 5), st.floats(0.01, 100.0), st.integers(0, 1000))
def test_no_calibration_beats_the_bound(
    fold: OperatorPredictor, rows: int, lie: float, seed: int
) -> None:
    shown = table((STRANGER,), rows=rows, seed=seed)
    shown.latency_s[:] *= lie
    asked = table((STRANGER,), rows=50, seed=4)
    found = CalibratedPredictor(fold).fit(shown).predict(asked)
    assert np.isfinite(found).all()
    assert (found >= features(asked, "wide").bound_s * (1 - 1e-9)).all()


def test_rows_that_nothing_is_known_of(fold: OperatorPredictor) -> None:
    shown = table((STRANGER,), rows=4)
    with pytest.raises(SpecError, match="calibration rows"):
        CalibratedPredictor(fold).fit(shown.take(np.arange(0)))


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0.01, 5)), min_size=1, max_size=7))
def test_weighted_median(pairs: list[tuple[float, float]]) -> None:
    values, weights = np.array(pairs).T
    found = _weighted_median(values[None], weights)[0]
    total = weights.sum()
    assert found in values
    assert weights[values <= found].sum() >= 0.5 * total - 1e-9
    assert weights[values >= found].sum() >= 0.5 * total - 1e-9


def test_folds_report_calibrated_errors_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    everything = table(tuple(HOSTS), rows=120)
    result = cross_validate(everything, seeds=[0], calibrate=[1, 64], score_rows=200)
    cells = result["cells"]
    assert isinstance(cells, dict)
    mape = cells[f"{STRANGER}|elementwise|fp32"]["mape"]
    assert list(mape) == ["foreplan", "foreplan, 1 rows", "foreplan, 64 rows"]
    assert mape["foreplan, 64 rows"] < 0.5 * mape["foreplan"]
    path = tmp_path / "rows.parquet"
    write_operators(everything, path)
    main(["--data", str(path), "--format", "foreplan", "--seeds", "0", "--calibrate", "8",
          "--score-rows", "200"])  # fmt: skip
    assert set(json.loads(capsys.readouterr().out)["cells"]) == set(cells)
