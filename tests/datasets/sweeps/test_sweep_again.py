"""Products of a sweep's table, timed once more."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]
import pyarrow.parquet as pq  # type: ignore[import-untyped, unused-ignore]
import pytest
import torch

from foreplan.datasets.sweeps.operator_case import Operands
from foreplan.datasets.sweeps.operator_cases import graph_cases
from foreplan.datasets.sweeps.operator_sweep import main
from foreplan.datasets.sweeps.product_cases import product_again
from foreplan.datasets.sweeps.sweep_again import SweptProducts
from foreplan.errors import SpecError

SMALL = 2e-6


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Twelve operators of a sweep, products of all kinds among them, of 1 to 12 us."""
    names = ("linear", "bmm", "softmax")
    rows = [
        {"op": case.op, "kind": case.kind, "dtype": case.dtype, "library": "torch_graph-2.11-cuda",
         "device": "NVIDIA H200",
         **{name: float(case.dims.get(name, 0)) for name in ("b", "m", "n", "k", "turned")},
         "rows": float(case.dims.get("rows", 0)), "latency_s": 1e-6 * (at + 1), "source_row": at}
        for at, case in enumerate(itertools.islice(graph_cases(3, scale=SMALL, names=names), 12))
    ]  # fmt: skip
    path = tmp_path / "swept.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_a_row_is_the_product_that_was_drawn() -> None:
    view = Operands("cpu", 3e8)
    for case in itertools.islice(graph_cases(1, scale=SMALL, names=("linear", "bmm")), 30):
        again = product_again({"op": case.op, "dtype": case.dtype, **case.dims})
        assert (again.op, again.kind, again.dtype, again.dims) == case[:4]
        for one, two in zip(case.calls(view), again.calls(view), strict=True):
            wanted, found = one(), two()
            assert found.shape == wanted.shape
            if case.op == "bmm" or case.dims["turned"]:  # a linear may have had a bias
                assert torch.equal(found, wanted)


def test_products_have_values_of_either_sign_and_no_others_do() -> None:
    view = Operands("cpu", 1e6)
    assert 0.5 <= view("fp32", 0, 100, 100).min() <= view("fp32", 0, 100, 100).max() <= 1.5
    drawn = view("fp32", 0, 100, 100, normal=True)
    assert abs(float(drawn.mean())) < 0.1
    assert float(drawn.std()) == pytest.approx(1.0, abs=0.1)


def test_products_near_the_peak_come_first(table: Path) -> None:
    swept = SweptProducts.read(table)
    cases = list(swept.cases())
    before = pq.read_table(table).to_pylist()
    assert {before[at]["op"] for at in swept.places} == {"linear", "bmm"}
    rates = [
        np.prod([case.dims[name] for name in "bmnk"]) / before[at]["latency_s"]
        for at, case in zip(swept.places, cases, strict=True)
    ]
    assert rates == sorted(rates, reverse=True)
    few = SweptProducts.read(table, 2 * rates[2])
    assert few.places == swept.places[:3]


def test_times_stand_in_their_places(table: Path, tmp_path: Path) -> None:
    swept, out = SweptProducts.read(table), tmp_path / "again.parquet"
    journal = tmp_path / "again.parquet.journal"
    head = {"seed": 0, "timing": "graph", "library": "x", "device": "y", "again": table.name}
    lines = [head, [0], [0, 0.5], [1], [2], [2, None, "RuntimeError: no memory"], [3], [3, 0.25]]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = ["-o", str(out), "--timing", "graph", "--again", str(table), "--seconds", "0"]
    assert main(asked) == 0
    before, after = (pq.read_table(path).to_pylist() for path in (table, out))
    changed = {swept.places[0]: 0.5, swept.places[3]: 0.25}
    for at, (one, two) in enumerate(zip(before, after, strict=True)):
        assert two == {**one, "latency_s": changed.get(at, one["latency_s"])}


def test_what_cannot_be_timed_again_is_refused(table: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.parquet"
    text.write_text("no table")
    with pytest.raises(SpecError, match=r"text.parquet: got .* expected a table of a sweep"):
        SweptProducts.read(text)
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"op": ["linear"]}), other)
    with pytest.raises(SpecError, match=r"other.parquet"):
        SweptProducts.read(other)
    with pytest.raises(SpecError, match="--again"):
        main(["-o", str(tmp_path / "x"), "--again", str(table)])
