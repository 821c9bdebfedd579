"""Synthetic tasks: reproducible, of no family, without those of networks; sizes within limits."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.datasets.tir import toolchain
from foreplan.errors import MissingDataError, SpecError

torch = pytest.importorskip("torch")
try:
    toolchain.load_tvm()  # before the blocks load torch's front ends
except (MissingDataError, SpecError) as error:
    pytest.skip(f"needs TVM: {error}", allow_module_level=True)

from foreplan.datasets.tir import synthetic  # noqa: E402
from foreplan.datasets.tir._synthetic_blocks import draw  # noqa: E402
from foreplan.datasets.tir._synthetic_dice import MOST_ELEMENTS, Dice  # noqa: E402
from foreplan.datasets.tir.synthetic import known_keys, main, synthetic_tasks  # noqa: E402
from foreplan.datasets.tir.tir_jsonl import read_tasks  # noqa: E402


@given(seed=st.integers(0, 2**31), rank=st.integers(1, 5))
def test_shapes_stay_within_the_limit(seed: int, rank: int) -> None:
    shape = Dice(seed).shape(rank)
    assert len(shape) == rank
    assert min(shape) >= 1
    assert math.prod(shape) <= MOST_ELEMENTS


@given(seed=st.integers(0, 2**31))
def test_features_and_factors_are_what_was_asked_for(seed: int) -> None:
    dice = Dice(seed)
    size = dice.features(3, 700)
    assert 3 <= size <= 732  # rounded to the nearest 64
    first, second = dice.factors(size)
    assert first * second == size


@given(seed=st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_every_graph_runs_and_is_drawn_again_from_its_seed(seed: int) -> None:
    module, inputs, kind, trained = draw(seed)
    again = draw(seed)
    assert [t.shape for t in again[1]] == [t.shape for t in inputs]
    assert again[2:] == (kind, trained)
    if sum(t.numel() for t in inputs) < 200_000:
        with torch.no_grad():
            module(*inputs)


def test_tasks_have_no_family_and_leave_out_what_is_known(tmp_path: Path) -> None:
    tasks = synthetic_tasks(4, seed=5)
    assert len({task.key for task in tasks}) == len(tasks) >= 4
    assert all(task.families == frozenset() for task in tasks)
    assert all(name.startswith("synthetic/seed=5,graph=") for t in tasks for name in t.calls)
    file = tmp_path / "tasks.jsonl.xz"
    assert main(["-o", str(file), "--count", "4", "--seed", "5"]) == 0
    assert [task.key for task in read_tasks(file)] == [task.key for task in tasks]
    others = synthetic_tasks(4, seed=5, known=known_keys([file]))
    assert not {task.key for task in others} & {task.key for task in tasks}


@pytest.mark.parametrize("limit", [2e6, 5e9])
def test_no_product_is_larger_than_asked_for(limit: float) -> None:
    sizes = []
    for seed in range(40):
        module, inputs, kind, _ = draw(seed, ["product"], limit)
        assert kind == "product"
        x, y = (inputs or tuple(module.parameters()))[:2]
        columns = y.shape[-1] if y.shape[-2] == x.shape[-1] else y.shape[-2]
        sizes.append(x.numel() * columns)
    assert max(sizes) <= limit
    assert max(sizes) > limit / 100  # and the limit is what holds them down


def test_only_tasks_so_named_are_kept() -> None:
    tasks = synthetic_tasks(3, seed=5, kinds=["linear"], named=["matmul"])
    assert all("matmul" in task.name for task in tasks)
    every = synthetic_tasks(6, seed=5, kinds=["linear"])
    assert {task.key for task in tasks} < {task.key for task in every}


def test_names_that_no_task_has_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "_PATIENCE", 3)
    with pytest.raises(SpecError, match="none in 3 graphs"):
        synthetic_tasks(1, seed=5, kinds=["linear"], named=["no such operator"])


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["-o", "t", "--kinds", "recurrent"], 2, "--kinds"),
        (["-o", "t", "--most-products", "10"], 2, "--most-products"),
        (["-o", "t", "--without", "none.jsonl"], 4, "no such file"),
        (["-o", "t", "--count", "0"], 2, "--count"),
        (["-o", "no_folder/t"], 2, "no_folder"),
    ],
)
def test_bad_input_ends_with_one_line(
    words: list[str], code: int, part: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(words) == code
    said = capsys.readouterr().err
    assert part in said
    assert said.count("\n") == 1
    assert not (tmp_path / "t").exists()
