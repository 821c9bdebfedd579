"""Forests of a kind of device are averaged, and each keeps to its kind."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from foreplan.cost_models.programs.compact_ast import CompactAst, CompactAstEncoder
from foreplan.cost_models.programs.program_devices import record_device
from foreplan.cost_models.programs.program_inputs import fit_scale, program_inputs
from foreplan.cost_models.programs.program_table import ProgramTable
from foreplan.cost_models.programs.program_trees import ProgramTrees
from foreplan.datasets.tir.task import decode_module

_LINES = (Path(__file__).parents[1] / "data" / "tir_examples.jsonl").read_text().splitlines()


def _table() -> ProgramTable:
    encoder, generator = CompactAstEncoder(), np.random.default_rng(0)
    examples = [encoder.encode(decode_module(json.loads(line)["mod"])) for line in _LINES]
    asts, seconds = [], []
    for number in range(120):
        ast = examples[number % len(examples)]
        leaves = ast.leaves * np.float32(1 + 0.1 * generator.random(ast.leaves.shape))
        asts.append(CompactAst(leaves, ast.position, ast.depth, ast.totals))
        seconds.append(1e-6 * (1 + leaves[:, 10].mean() ** 2))
    core = record_device("cpu:threads=1,isa=avx2", "Some CPU", 2e9)
    return ProgramTable.from_asts(asts, core, latency_s=seconds)


def test_forests_of_processors_are_averaged_and_kept() -> None:
    table = _table()
    inputs = program_inputs(table, fit_scale(table, table.latency_s))
    trees = ProgramTrees.fit(
        inputs, table.latency_s, rounds=20, depth=3, learning_rate=0.1, threads=1, seed=0
    )
    assert set(trees.ensembles) == {"cpu", "cpu_sizes"}
    each = [ProgramTrees({name: one}).predict(inputs) for name, one in trees.ensembles.items()]
    assert not np.allclose(each[0], each[1])
    np.testing.assert_allclose(trees.predict(inputs), np.mean(each, axis=0), atol=1e-9)
    again = ProgramTrees.from_arrays(trees.arrays())
    np.testing.assert_array_equal(again.predict(inputs), trees.predict(inputs))
    # What was never fitted leaves a leaf as its scale has it.
    on_gpu = inputs._replace(cpu=np.zeros_like(inputs.cpu))
    assert not trees.predict(on_gpu).any()
