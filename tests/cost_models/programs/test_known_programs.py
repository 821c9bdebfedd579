"""Programs that a device like this one has timed: made-up labels that no text of them tells."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foreplan.cost_models.programs.compact_ast import CompactAst, CompactAstEncoder
from foreplan.cost_models.programs.known_programs import KnownPrograms, digests
from foreplan.cost_models.programs.program_predictor import ProgramPredictor
from foreplan.cost_models.programs.program_table import Floats, ProgramTable
from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.tir.task import decode_module
from foreplan.errors import SpecError

_LINES = (Path(__file__).parents[1] / "data" / "tir_examples.jsonl").read_text().splitlines()
H200, H100, T4 = (device_zoo.device(name) for name in ("h200", "h100_sxm", "t4"))
NEW = H100.model_copy(update={"name": "new", "chip": "new"})


@pytest.fixture(scope="module")
def table() -> ProgramTable:
    """A hundred programs of twenty tasks on an H200, their times drawn."""
    encoder = CompactAstEncoder()
    examples = [encoder.encode(decode_module(json.loads(line)["mod"])) for line in _LINES]
    dice = np.random.default_rng(0)
    asts = []
    for number in range(100):
        ast = examples[number % len(examples)]
        leaves = ast.leaves + np.float32(0.2 * dice.standard_normal(ast.leaves.shape))
        asts.append(CompactAst(leaves, ast.position, ast.depth, ast.totals))
    return ProgramTable.from_asts(
        asts, H200, latency_s=(1e-4 * np.exp(dice.standard_normal(100))).tolist(),
        task=[f"t{number % 20}" for number in range(100)],
        family=["even" if number % 2 else "odd" for number in range(100)],
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(table: ProgramTable) -> ProgramPredictor:
    return ProgramPredictor(rounds=10, networks=0, groups=0).fit(table)


def on(table: ProgramTable, device: Device, seconds: Floats) -> ProgramTable:
    return replace(table, devices=(device,), latency_s=np.asarray(seconds, dtype=float))


def error(model: ProgramPredictor, table: ProgramTable) -> float:
    return float(np.abs(model.predict(table) / table.latency_s - 1).mean())


def test_equal_leaves_are_equal_programs(table: ProgramTable) -> None:
    asked = digests(table)
    assert len(set(asked.tolist())) == len(table)
    order = np.random.default_rng(1).permutation(len(table))
    np.testing.assert_array_equal(digests(table.take(order)), asked[order])
    nearly = replace(table, leaves=table.leaves * np.float32(1 + 1e-7))
    assert np.mean(digests(nearly) == asked) > 0.9
    twice = ProgramTable.join([table, on(table, H200, 4 * table.latency_s)])
    known = KnownPrograms.of(twice, twice.latency_s)
    assert len(known) == len(table)
    np.testing.assert_allclose(known.seconds(asked, "h200"), 2.5 * table.latency_s, rtol=1e-6)
    assert np.isnan(known.seconds(asked, "t4")).all()
    assert np.isnan(known.seconds(asked + np.uint64(1), "h200")).any()


def test_a_board_of_a_known_chip_is_as_much_slower_as_predictions_say(
    model: ProgramPredictor, table: ProgramTable
) -> None:
    ratio = np.exp(model.logs(on(table, H100, table.latency_s)) - model.logs(table))
    assert ratio.max() > 1.02  # its memory is slower
    found = model.predict(on(table, H100, table.latency_s))
    np.testing.assert_allclose(found, ratio * table.latency_s, rtol=1e-5)
    # Neither what it was trained on nor another chip is copied, nor a program that nobody timed.
    for device in (H200, T4):
        asked = on(table, device, table.latency_s)
        np.testing.assert_allclose(model.predict(asked), np.exp(model.logs(asked)))
    strange = on(replace(table, leaves=table.leaves + 1), H100, table.latency_s)
    np.testing.assert_allclose(model.predict(strange), np.exp(model.logs(strange)))


def test_copies_of_another_chip_are_taken_where_measured_tasks_say_so(
    model: ProgramPredictor, table: ProgramTable, tmp_path: Path
) -> None:
    slower = on(table, NEW, 3 * table.latency_s)
    few = np.isin(table.task, [f"t{number}" for number in range(8)])
    before = deepcopy(model)
    tuned = deepcopy(model).continue_fit(slower.take(few))
    rule = tuned.copies_["new"]
    assert (rule.source, rule.share) == ("h200", 1.0)
    assert rule.factor == pytest.approx(np.log(3))
    assert error(tuned, slower.take(~few)) < 0.01 < 0.5 < error(model, slower.take(~few))
    assert model.copies_ == before.copies_ == {}
    tuned.save(tmp_path)
    again = ProgramPredictor.load(tmp_path)
    np.testing.assert_array_equal(again.predict(slower), tuned.predict(slower))
    # Times that have nothing to do with the other chip's are not copied from it.
    drawn = 1e-4 * np.exp(np.random.default_rng(5).standard_normal(len(table)))
    assert deepcopy(model).continue_fit(on(table, NEW, drawn)).copies_ == {}
    # Four tasks are too few to tell.
    few = np.isin(table.task, [f"t{number}" for number in range(4)])
    assert deepcopy(model).continue_fit(slower.take(few)).copies_ == {}


def test_weights_of_before_there_were_known_programs_are_read(
    model: ProgramPredictor, table: ProgramTable, tmp_path: Path
) -> None:
    old = deepcopy(model)
    old.known_ = KnownPrograms.from_arrays({}, ())
    old.save(tmp_path)
    card = json.loads((tmp_path / "card.json").read_text())
    del card["known"], card["copies"]
    (tmp_path / "card.json").write_text(json.dumps(card))
    again = ProgramPredictor.load(tmp_path)
    asked = on(table, H100, table.latency_s)
    np.testing.assert_allclose(again.predict(asked), np.exp(model.logs(asked)))


@pytest.mark.parametrize("wrong", [
    {"known": ["nobody"]}, {"copies": {"new": ["nobody", 0.0, 1.0]}}, {"copies": {"new": ["h200"]}},
])  # fmt: skip
def test_a_card_that_names_devices_it_does_not_describe_is_refused(
    wrong: dict[str, object], model: ProgramPredictor, tmp_path: Path
) -> None:
    model.save(tmp_path)
    card = json.loads((tmp_path / "card.json").read_text())
    (tmp_path / "card.json").write_text(json.dumps({**card, **wrong}))
    with pytest.raises(SpecError, match="weights that fit the card"):
        ProgramPredictor.load(tmp_path)


@pytest.mark.parametrize("wrong", [
    {"device": np.array([0, 3], dtype=np.int16)},
    {"latency_s": np.array([1.0, np.nan], dtype=np.float32)},
    {"digest": np.array([1], dtype=np.uint64)},
])  # fmt: skip
def test_damaged_known_programs_are_refused(
    wrong: dict[str, np.ndarray], model: ProgramPredictor, tmp_path: Path
) -> None:
    arrays = {
        "digest": np.array([1, 2], dtype=np.uint64), "device": np.array([0, 0], dtype=np.int16),
        "latency_s": np.array([1.0, 2.0], dtype=np.float32),
    }  # fmt: skip
    KnownPrograms.from_arrays(arrays, ("h200",))
    with pytest.raises(ValueError, match="known programs"):
        KnownPrograms.from_arrays({**arrays, **wrong}, ("h200",))
    damaged = deepcopy(model)
    damaged.known_ = KnownPrograms(**{**arrays, **wrong}, devices=("h200",))
    damaged.save(tmp_path)
    with pytest.raises(SpecError, match="weights that fit the card"):
        ProgramPredictor.load(tmp_path)
