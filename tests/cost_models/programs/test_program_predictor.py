"""The predictors' contract on programs with made-up labels; accuracy on real data is elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.exceptions import NotFittedError

from foreplan.cost_models.programs._program_network import (
    ProgramNetwork,
    central_moment_discrepancy,
)
from foreplan.cost_models.programs.baselines import BASELINES
from foreplan.cost_models.programs.compact_ast import CompactAst, CompactAstEncoder
from foreplan.cost_models.programs.program_bound import program_bound
from foreplan.cost_models.programs.program_fitting import fit_together
from foreplan.cost_models.programs.program_inputs import program_inputs
from foreplan.cost_models.programs.program_predictor import ProgramPredictor
from foreplan.cost_models.programs.program_table import ProgramTable, by_leaf_count
from foreplan.datasets import device_zoo
from foreplan.datasets.tir.task import decode_module
from foreplan.errors import MissingDataError, SpecError

_LINES = (Path(__file__).parents[1] / "data" / "tir_examples.jsonl").read_text().splitlines()


@pytest.fixture(scope="module")
def table() -> ProgramTable:
    """Two devices, 160 programs: the examples with their loops' entries moved about."""
    encoder = CompactAstEncoder()
    examples = [encoder.encode(decode_module(json.loads(line)["mod"])) for line in _LINES]
    generator = np.random.default_rng(0)
    parts = []
    for name in ("h200", "t4"):
        asts, seconds = [], []
        for number in range(80):
            ast = examples[number % len(examples)]
            scale = 2.0 ** generator.integers(0, 8)
            leaves = ast.leaves + np.float32(0.2 * generator.standard_normal(ast.leaves.shape))
            asts.append(CompactAst(leaves, ast.position, ast.depth, ast.totals * scale))
            slower = 3 if name == "t4" else 1
            seconds.append(1e-6 * slower * scale * (1 + leaves[:, 10].mean() ** 2))
        parts.append(
            ProgramTable.from_asts(
                asts, device_zoo.device(name), latency_s=seconds,
                task=[f"t{number % 20}" for number in range(80)],
                family=["even" if number % 2 else "odd" for number in range(80)],
            )
        )  # fmt: skip
    return ProgramTable.join(parts)


@pytest.fixture(scope="module")
def model(table: ProgramTable) -> ProgramPredictor:
    return ProgramPredictor(
        rounds=60, networks=2, groups=2, width=32, layers=1, epochs=20, batch=32, seed=1
    ).fit(table)


def test_it_learns_and_stays_above_the_bound(model: ProgramPredictor, table: ProgramTable) -> None:
    seconds = model.predict(table)
    assert np.median(np.abs(seconds / table.latency_s - 1)) < 0.35
    assert np.all(seconds >= program_bound(table).bound_s * (1 - 1e-5))
    assert 0 <= model.weight_ <= 1
    mean, low, high = model.predict_interval(table)
    assert np.all((low < mean) & (mean < high))


def test_rows_do_not_depend_on_their_neighbours(
    model: ProgramPredictor, table: ProgramTable
) -> None:
    rows = np.array([7, 3, 100])
    np.testing.assert_allclose(
        model.predict(table.take(rows)), model.predict(table)[rows], rtol=2e-5
    )


def test_saved_and_loaded_is_the_same(
    model: ProgramPredictor, table: ProgramTable, tmp_path: Path
) -> None:
    model.save(tmp_path, note="a test")
    again = ProgramPredictor.load(tmp_path)
    np.testing.assert_array_equal(again.predict(table), model.predict(table))
    assert again.card_["note"] == "a test"
    card = json.loads((tmp_path / "card.json").read_text())
    (tmp_path / "card.json").write_text(json.dumps({**card, "features": 0}))
    with pytest.raises(SpecError, match="features"):
        ProgramPredictor.load(tmp_path)
    with pytest.raises(MissingDataError):
        ProgramPredictor.load(tmp_path / "none")


def test_same_seed_same_model(table: ProgramTable) -> None:
    one, two = (
        ProgramPredictor(rounds=5, groups=2, networks=1, width=16, layers=1, epochs=2, seed=3).fit(
            table
        )
        for _ in "ab"
    )
    np.testing.assert_array_equal(one.predict(table), two.predict(table))


def test_predictors_fitted_together_keep_to_their_own_rows(table: ProgramTable) -> None:
    fast = table.take(np.flatnonzero(table.device == 0))
    slow = table.take(np.flatnonzero(table.device == 0))
    object.__setattr__(slow, "latency_s", 10 * slow.latency_s)
    models = [
        ProgramPredictor(rounds=10, groups=2, networks=1, width=16, layers=1, epochs=10, seed=n)
        for n in range(2)
    ]
    one, two = fit_together(models, [fast, slow])
    for model, own in ((one, fast), (two, slow)):
        network = model.networks_[0].predict(own, program_inputs(own, model.scale_))[0]
        assert abs(np.median(network - np.log(own.latency_s))) < 1
        assert np.median(np.abs(model.predict(own) / own.latency_s - 1)) < 0.6


def test_fine_tuning_on_few_programs_helps(model: ProgramPredictor, table: ProgramTable) -> None:
    from copy import deepcopy

    rows = np.flatnonzero(table.device == 1)
    slow = table.take(rows)
    object.__setattr__(slow, "latency_s", 5 * slow.latency_s)
    tuned = deepcopy(model).continue_fit(slow, epochs=30, learning_rate=1e-3)

    def error(m: ProgramPredictor) -> float:
        return float(np.median(np.abs(m.predict(slow) / slow.latency_s - 1)))

    assert error(tuned) < 0.6 * error(model)


def test_a_new_device_starts_as_the_known_one_that_suits_its_rows(
    table: ProgramTable, tmp_path: Path
) -> None:
    from copy import deepcopy

    model = ProgramPredictor(rounds=10, networks=0, groups=0).fit(table)
    rows = table.take(table.device == 1)
    new = table.devices[1].model_copy(update={"name": "new", "chip": "new"})
    object.__setattr__(rows, "devices", (table.devices[0], new))
    object.__setattr__(rows, "latency_s", 2 * model.predict(table.take(table.device == 1)))
    tuned = deepcopy(model).continue_fit(rows)
    start = tuned.scale_.devices["new"].factors
    np.testing.assert_array_equal(start, model.scale_.devices["t4"].factors)
    assert set(model.scale_.devices) == {"h200", "t4"}
    tuned.save(tmp_path)
    loaded = ProgramPredictor.load(tmp_path)  # the card describes the new device too
    np.testing.assert_allclose(loaded.predict(rows), tuned.predict(rows), rtol=1e-6)
    again = deepcopy(tuned).continue_fit(rows)
    assert len(again.card_["devices"]) == 3
    # Where some known device has its instructions, no other is asked.
    model.card_["devices"][0]["isa"] = ["avx2"]
    vector = new.model_copy(update={"isa": ("avx2",)})
    object.__setattr__(rows, "devices", (table.devices[0], vector))
    tuned = deepcopy(model).continue_fit(rows)
    start = tuned.scale_.devices["new"].factors
    np.testing.assert_array_equal(start, model.scale_.devices["h200"].factors)


def test_bad_labels_and_unknown_devices_are_refused(table: ProgramTable) -> None:
    with pytest.raises(SpecError):
        ProgramPredictor().fit(table, 0 * table.latency_s)
    with pytest.raises(NotFittedError, match="ProgramPredictor"):
        ProgramPredictor().predict(table)
    bare = table.devices[0].model_copy(update={"memory_bandwidth": None})
    first = table.take(np.flatnonzero(table.device == 0))
    object.__setattr__(first, "devices", (bare,))
    with pytest.raises(MissingDataError, match="bandwidth"):
        program_bound(first)


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_baselines_keep_the_contract(name: str, table: ProgramTable) -> None:
    short: dict[str, Any] = {"epochs": 8} if name in ("mlp", "tree_lstm", "cdmpp") else {}
    if name == "xgboost":
        short = {"rounds": 40}
    baseline = BASELINES[name](seed=0, **short).fit(table)
    seconds = baseline.predict(table)
    assert seconds.shape == (len(table),)
    assert np.all(np.isfinite(seconds) & (seconds > 0))
    assert baseline.get_params()["seed"] == 0


def test_masked_leaves_do_not_count() -> None:
    torch.manual_seed(0)
    network = ProgramNetwork(7, 4, width=16, layers=2).eval()
    leaves, places, device = torch.randn(1, 3, 7), torch.ones(1, 3, 2), torch.randn(1, 4)
    mask = torch.ones(1, 3, dtype=torch.bool)
    alone, _ = network(leaves, places, mask, device)
    padded, _ = network(
        torch.cat([leaves, 9 * torch.randn(1, 5, 7)], 1), torch.ones(1, 8, 2),
        torch.cat([mask, torch.zeros(1, 5, dtype=torch.bool)], 1), device,
    )  # fmt: skip
    torch.testing.assert_close(alone, padded)


def test_discrepancy_of_a_sample_from_itself_is_zero() -> None:
    half = torch.rand(50, 8) * 2 - 1
    one = torch.cat([torch.ones(50), torch.zeros(50)])
    same = central_moment_discrepancy(torch.cat([half, half]), one, 1 - one)
    assert same == pytest.approx(0, abs=1e-4)
    assert central_moment_discrepancy(torch.cat([half, half + 0.3]), one, 1 - one) > 0.1


def test_batches_cover_every_row_once() -> None:
    counts = np.random.default_rng(0).integers(1, 30, 1000)
    batches = list(by_leaf_count(counts, 64, np.random.default_rng(1)))
    assert sorted(np.concatenate(batches).tolist()) == list(range(1000))
    spread = [np.ptp(counts[rows]) for rows in batches]
    assert np.mean(spread) < 6
