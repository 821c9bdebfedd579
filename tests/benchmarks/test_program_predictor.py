"""Speed of prediction with the shipped weights; encoding of programs apart (test_compact_ast)."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from foreplan.cost_models.programs.program_commands import load_program_model
from foreplan.cost_models.programs.program_data import read_programs
from foreplan.cost_models.programs.program_table import ProgramTable

_PROGRAMS = Path(__file__).parents[2] / "datasets" / "measured" / "h200_programs"


@pytest.fixture(scope="module")
def table() -> ProgramTable:
    shards = sorted(_PROGRAMS.glob("*.parquet"))
    if not shards:
        pytest.skip("the measured programs come with a checkout only")
    found = read_programs(shards[:1]).table
    return ProgramTable.join([found] * (1 + 4000 // len(found)))


def test_programs_per_second(benchmark, table: ProgramTable) -> None:  # type: ignore[no-untyped-def]
    import torch

    model = load_program_model("pretrained:programs")
    model.predict(table.take(np.arange(8)))  # compiles the trees
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    begun = time.process_time()
    try:
        seconds = benchmark.pedantic(model.predict, (table,), rounds=1)
    finally:
        torch.set_num_threads(threads)
    spent = time.process_time() - begun
    assert np.all(seconds > 0)
    if benchmark.stats is not None:
        benchmark.extra_info["programs_per_cpu_second"] = round(len(table) / spent)
        print(f"{len(table)} programs: {len(table) / spent:,.0f} a CPU-second")
