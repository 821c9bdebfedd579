"""Perceptrons on leaves: they learn, are kept to the last bit, and are averaged with trees."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from foreplan.cost_models.programs import program_trees
from foreplan.cost_models.programs.compact_ast import CompactAst, CompactAstEncoder
from foreplan.cost_models.programs.program_devices import record_device
from foreplan.cost_models.programs.program_inputs import ProgramInputs, fit_scale, program_inputs
from foreplan.cost_models.programs.program_perceptrons import ProgramPerceptrons
from foreplan.cost_models.programs.program_table import ProgramTable
from foreplan.cost_models.programs.program_trees import ProgramTrees
from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.tir.task import decode_module

_LINES = (Path(__file__).parents[1] / "data" / "tir_examples.jsonl").read_text().splitlines()
FIT = {"rounds": 10, "depth": 3, "learning_rate": 0.1, "threads": 1, "seed": 0}


def table(count: int, device: Device, seed: int = 0) -> ProgramTable:
    """Programs whose latency hangs on what their leaves are like."""
    encoder, generator = CompactAstEncoder(), np.random.default_rng(seed)
    examples = [encoder.encode(decode_module(json.loads(line)["mod"])) for line in _LINES]
    asts, seconds = [], []
    for number in range(count):
        ast = examples[number % len(examples)]
        leaves = ast.leaves * np.float32(1 + generator.random(ast.leaves.shape))
        asts.append(CompactAst(leaves, ast.position, ast.depth, ast.totals))
        seconds.append(1e-5 * (1 + leaves[:, 10].mean() ** 2))
    return ProgramTable.from_asts(asts, device, latency_s=seconds)


@pytest.fixture(scope="module")
def gpu() -> tuple[ProgramInputs, np.ndarray]:
    programs = table(300, device_zoo.device("h200"))
    return program_inputs(programs, fit_scale(programs, programs.latency_s)), programs.latency_s


def error(inputs: ProgramInputs, corrections: np.ndarray, latency_s: np.ndarray) -> float:
    found = np.add.reduceat(inputs.leaf_s * np.exp(corrections), inputs.starts)
    return float(np.abs(found / latency_s - 1).mean())


def test_they_learn_and_are_kept_to_the_last_bit(gpu: tuple[ProgramInputs, np.ndarray]) -> None:
    inputs, seconds = gpu
    made = ProgramPerceptrons.fit(inputs, seconds, epochs=60, seed=0)
    before = error(inputs, np.zeros(len(inputs.program)), seconds)
    assert error(inputs, made.predict(inputs.flat), seconds) < 0.5 * before
    again = ProgramPerceptrons(made.arrays())
    np.testing.assert_array_equal(again.predict(inputs.flat), made.predict(inputs.flat))
    # By hand: the first leaf, layer by layer.
    arrays = made.arrays()
    values = (inputs.flat[0, arrays["kept"]] - arrays["mean"]) / arrays["unit"]
    values = np.nan_to_num(np.clip(values, -5, 5))
    for number in range(3):
        values = values @ arrays[f"weight{number}"] + arrays[f"bias{number}"]
        values = values / (1 + np.exp(-values))
    expected = values @ arrays["weight3"] + arrays["bias3"]
    assert made.predict(inputs.flat[:1])[0] == pytest.approx(float(expected[0]), abs=1e-4)


def test_equal_seeds_make_equal_perceptrons(gpu: tuple[ProgramInputs, np.ndarray]) -> None:
    inputs, seconds = gpu
    one, same, other = (
        ProgramPerceptrons.fit(inputs, seconds, epochs=2, seed=seed).predict(inputs.flat)
        for seed in (3, 3, 4)
    )
    np.testing.assert_array_equal(one, same)
    assert not np.allclose(one, other)


def test_without_a_pass_nothing_is_corrected(gpu: tuple[ProgramInputs, np.ndarray]) -> None:
    inputs, seconds = gpu
    made = ProgramPerceptrons.fit(inputs, seconds, epochs=0, seed=0)
    assert not made.predict(inputs.flat).any()


def test_what_is_unknown_and_far_out_stays_finite(gpu: tuple[ProgramInputs, np.ndarray]) -> None:
    inputs, seconds = gpu
    made = ProgramPerceptrons.fit(inputs, seconds, epochs=2, seed=0)
    flat = np.full((3, inputs.flat.shape[1]), np.nan, dtype=np.float32)
    flat[1], flat[2] = 1e30, -1e30
    assert np.isfinite(made.predict(flat)).all()


def test_shapes_that_do_not_fit_are_refused(gpu: tuple[ProgramInputs, np.ndarray]) -> None:
    arrays = dict(ProgramPerceptrons.fit(*gpu, epochs=0, seed=0).arrays())
    with pytest.raises(KeyError):
        ProgramPerceptrons({k: v for k, v in arrays.items() if k != "bias2"})
    with pytest.raises(ValueError, match="layers"):
        ProgramPerceptrons(arrays | {"weight1": arrays["weight1"][1:]})
    with pytest.raises(ValueError, match="columns"):
        ProgramPerceptrons(arrays | {"mean": arrays["mean"][1:]})


def test_gpus_have_the_mean_of_trees_and_perceptrons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_trees, "LEAST_PROGRAMS", 100)
    core = record_device("cpu:threads=1,isa=avx2", "Some CPU", 2e9)
    both = ProgramTable.join([
        table(60, core), table(120, device_zoo.device("h200")), table(60, core, seed=1),
    ])  # fmt: skip
    inputs = program_inputs(both, fit_scale(both, both.latency_s))
    made = ProgramTrees.fit(inputs, both.latency_s, **FIT, perceptron_epochs=3)  # type: ignore[arg-type]
    assert made.perceptrons is not None
    alone = ProgramTrees(made.ensembles).predict(inputs)
    beside = made.perceptrons.predict(inputs.flat)
    on_gpu = (~inputs.cpu)[inputs.program]
    found = made.predict(inputs)
    np.testing.assert_array_equal(found[~on_gpu], alone[~on_gpu])
    np.testing.assert_allclose(found[on_gpu], (alone + beside)[on_gpu] / 2, atol=1e-9)
    again = ProgramTrees.from_arrays(made.arrays())
    np.testing.assert_array_equal(again.predict(inputs), found)
    # The same as from programs of GPUs by themselves.
    of_gpus = inputs.of_gpus()
    np.testing.assert_array_equal(of_gpus.flat, inputs.flat[on_gpu])
    own = ProgramPerceptrons.fit(of_gpus, both.latency_s[~inputs.cpu], epochs=3, seed=0)
    np.testing.assert_allclose(own.predict(of_gpus.flat), beside[on_gpu], atol=1e-6)


def test_few_programs_have_none() -> None:
    few = table(120, device_zoo.device("h200"))
    inputs = program_inputs(few, fit_scale(few, few.latency_s))
    made = ProgramTrees.fit(inputs, few.latency_s, **FIT, perceptron_epochs=3)  # type: ignore[arg-type]
    assert made.perceptrons is None
