"""Norms of many short rows take a block of threads for each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from foreplan.cost_models.operators.operator_features import features
from foreplan.cost_models.operators.operator_work import operator_work
from foreplan.cost_models.operators.row_blocks import row_block_s
from foreplan.datasets.importers import read_operators
from foreplan.datasets.sweeps.operator_table import OperatorTable, operator_table, texts

MEASURED = Path(__file__).parents[3] / "datasets/measured"


def norms(kind: str, rows: int, cols: list[int], library: str = "torch_graph-2.11-cuda",
          rms: int = 0) -> OperatorTable:  # fmt: skip
    count = len(cols)
    return operator_table(
        op=texts([kind] * count), kind=texts([kind] * count), dtype=texts(["bfloat16"] * count),
        library=texts([library] * count), device=texts(["h200"] * count),
        dims={"rows": np.full(count, rows), "cols": np.array(cols), "rms": np.full(count, rms)},
        latency_s=np.ones(count),
    )  # fmt: skip


def seconds(table: OperatorTable) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return row_block_s(table, operator_work(table), np.full(len(table), 1e9))


def test_rows_cost_by_how_they_are_read_and_how_many_they_are() -> None:
    # 132 multiprocessors of 1 GHz: 1,320 rows are ten each.
    assert seconds(norms("layernorm", 1320, [64, 66, 256])) == pytest.approx(
        [10 * 300e-9, 10 * 1300e-9, 10 * 300e-9]
    )
    assert seconds(norms("layernorm", 1320, [64, 66], rms=1)) == pytest.approx(
        [10 * 170e-9, 10 * 1300e-9]
    )
    few, many = (seconds(norms("layernorm_gradient", n, [64]))[0] / n for n in (65_536, 65_537))
    assert few / many == pytest.approx(1000 / 300)
    for other in ("softmax", "reduction"):
        assert not seconds(norms(other, 1320, [64])).any()
    # Whoever timed them: what is asked of other chips has another library's name.
    assert seconds(norms("layernorm", 1320, [64], library="trtllm"))[0] == pytest.approx(3e-6)


@pytest.mark.parametrize("kind", ["layernorm", "layernorm_gradient"])
def test_narrow_rows_are_near_what_was_measured_before_anything_is_learned(kind: str) -> None:
    table = read_operators(MEASURED / "h200_operators_graph_masked.parquet", "foreplan")
    d = table.dims
    narrow = table.take((table.kind == kind) & (d["cols"] <= 512) & (d["rows"] > 10_000))
    assert len(narrow) > 40

    found = features(narrow, "wide").structural_s
    assert np.median(np.abs(np.log(found / narrow.latency_s))) < 0.25
    # By their bytes alone, several times too short.
    clock = np.full(len(narrow), 1.98e9)
    bytes_alone = found - row_block_s(narrow, operator_work(narrow), clock)
    assert np.median(np.log(narrow.latency_s / bytes_alone)) > 1.0
