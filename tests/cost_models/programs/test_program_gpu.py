"""What GPUs make of a program's memory of threads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from foreplan.cost_models.programs.compact_ast import FEATURE_NAMES, CompactAstEncoder
from foreplan.cost_models.programs.program_estimate import PART_NAMES, program_estimate
from foreplan.cost_models.programs.program_table import ProgramTable
from foreplan.datasets import device_zoo
from foreplan.datasets.tir.task import decode_module


def test_memory_of_a_thread_gets_registers_where_its_positions_are_constants() -> None:
    """Straight code beyond what was asked for, or code that outgrows its cache, costs time."""
    lines = (Path(__file__).parents[1] / "data" / "tir_examples.jsonl").read_text().splitlines()
    examples = {(example := json.loads(line))["name"]: example["mod"] for line in lines}
    ast = CompactAstEncoder().encode(decode_module(examples["many_virtual_threads"]).decode())

    def parts(**entries: float) -> dict[str, float]:
        leaves = ast.leaves.copy()
        for name, value in entries.items():
            leaves[:, FEATURE_NAMES.index(name.replace("__", "."))] = np.log2(1 + value)
        table = ProgramTable.from_asts([replace(ast, leaves=leaves)], device_zoo.device("h200"))
        return dict(zip(PART_NAMES, program_estimate(table).parts[0], strict=True))

    bytes_of = {"allocation__local_bytes": 1200.0, "gpu__straight": 200.0}
    assert parts(**bytes_of)["gpu.indexed"] == 0
    far = bytes_of | {"gpu__straight": 512.0}
    running, asked = parts(**far), parts(**far, loops__auto_unroll_step=512.0)
    assert running["gpu.indexed"] > 0 == running["gpu.indexed_far"]
    assert running["gpu.spilled"] == 0 == asked["gpu.indexed"]  # it lies in memory as it is
    few = parts(**far | {"allocation__local_bytes": 1020.0})  # 255 registers
    assert few["gpu.indexed"] == 0
    more = parts(**far | {"allocation__local_bytes": 1600.0}, loops__auto_unroll_step=512.0)
    assert more["gpu.spilled"] > 0 == more["gpu.indexed"]
    assert asked["gpu.fetched"] == 0
    assert parts(**far, gpu__arithmetic=1e9)["gpu.fetched"] > 0
    assert parts(gpu__passes=1e9)["gpu.l1"] > 1e3 * parts(gpu__passes=1e3)["gpu.l1"] > 0
