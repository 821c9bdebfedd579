"""Fits to two real devices by few tasks, on rows that they did not see: the law and the command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import foreplan.datasets
from foreplan.cost_models.rates.onboarding_curve import Rows, curve, main, read_rows
from foreplan.cost_models.rates.operator_rates import family
from foreplan.cost_models.rates.rate_model import RateModel
from foreplan.cost_models.rates.rescaled_roofline import RescaledRoofline
from foreplan.cost_models.rates.task_choice import choose_tasks
from foreplan.errors import SpecError

MEASURED = Path(next(iter(foreplan.datasets.__path__))) / "measured" / "epyc_library"
DEVICES = ("whole", "avx2")
#: A class of operators needs so many held-out rows before its mean error says anything.
ENOUGH = 20


@pytest.fixture(scope="module", params=DEVICES)
def rows(request: pytest.FixtureRequest) -> Rows:
    return read_rows(MEASURED / f"{request.param}.json.xz")


@pytest.mark.parametrize("count", [6, 12, 24, 48])
def test_no_class_of_operators_is_worse_off_than_with_the_rescaled_roofline(
    rows: Rows, count: int
) -> None:
    """Mean relative error on held-out rows, mean over four choices of tasks."""
    device, programs, seconds = rows
    errors: dict[str, list[tuple[float, float]]] = {}
    for seed in range(4):
        tasks = choose_tasks(programs, device, count, seed=seed)
        rest = np.setdiff1d(np.arange(len(programs)), tasks)
        given = [programs[i] for i in tasks]
        asked = [programs[i] for i in rest]
        kinds = np.array([family(program) for program in asked])
        off = [
            np.abs(model.fit(given, seconds[tasks]).predict(asked) / seconds[rest] - 1)
            for model in (RateModel(device), RescaledRoofline(device))
        ]
        for kind in {"", *kinds}:
            mine = (kinds == kind) | (kind == "")
            if mine.sum() >= ENOUGH:
                errors.setdefault(kind, []).append((off[0][mine].mean(), off[1][mine].mean()))
    assert {"", "product", "wide"} <= set(errors)
    for kind, found in errors.items():
        fitted, rescaled = np.mean(found, axis=0)
        assert fitted <= rescaled + 0.01, (kind, fitted, rescaled)


def test_more_tasks_help_and_kmeans_beats_chance(rows: Rows) -> None:
    table = curve(rows)
    fitted = [table[f"{count} KMeans, fitted"]["median"] for count in (8, 16, 32, 64)]
    assert fitted[-1] < fitted[0] / 2
    assert table["32 KMeans, fitted"]["all"] < table["32 random, fitted"]["all"]


def test_the_command_prints_a_table_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    main([str(MEASURED / f"{name}.json.xz") for name in DEVICES])
    text = capsys.readouterr().out
    assert text.count("| 32 KMeans, fitted |") == 2
    assert text.count("| 32 KMeans, other slice |") == 2
    assert "cpu:threads=1,isa=avx2" in text


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json.xz"
    path.write_bytes(b"no xz")
    with pytest.raises(SpecError, match="compressed profile"):
        read_rows(path)
