"""Operators timed by how long ago their weights were used: draws, the loop, the document."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

import foreplan.datasets
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.sweeps.reuse_sweep import DISTANCES, ReuseTimes, drawn, timed
from foreplan.errors import SpecError

COMMITTED = Path(next(iter(foreplan.datasets.__path__))) / "measured" / "epyc_reuse.json.xz"
FP32 = Variant("fp32", "fp32", "torch.linear")


def test_draws_are_linears_convolutions_and_attentions() -> None:
    found = drawn()
    assert found == drawn() != drawn(1)
    count = {op: sum(item.op == op for item in found) for op in {item.op for item in found}}
    assert count == {"linear": 64, "conv2d_forward": 48, "attention_forward": 16}
    assert {item.variant.compute for item in found} == {"fp32"}
    assert all(item.flops <= 4e8 for item in found if item.op != "attention_forward")
    assert any(item.dims["groups"] > 1 for item in found if item.op == "conv2d_forward")
    assert [row.program() for row in ReuseTimes.load(COMMITTED).rows] == found


@pytest.mark.serial
def test_an_operator_is_timed_at_every_distance() -> None:
    conv = next(item for item in drawn() if item.op == "conv2d_forward" and item.flops < 1e7)
    attention = program(
        "attention_forward", Variant("fp32", "fp32", "torch.sdpa_causal"), batch=1, queries=16,
        keys=16, heads=2, head_dim=16,
    )  # fmt: skip
    items: list[Program] = [program("linear", FP32, rows=8, n=64, k=64), conv, attention]
    rows = list(timed(items, 1 << 16, seconds=0.0))
    assert [row.program() for row in rows] == items
    assert all(len(row.median_s) == len(DISTANCES) for row in rows)
    assert all(0 < seconds < 1 for row in rows for seconds in row.median_s)


def test_a_weight_of_long_ago_takes_longer_where_it_was_measured() -> None:
    """In the committed rows: in the median, and most where there is least to compute."""
    times = ReuseTimes.load(COMMITTED)
    near, cold = times.distances.index(0.25), times.distances.index(2.0)
    ratios = sorted(row.median_s[cold] / row.median_s[near] for row in times.rows)
    assert sum(ratio < 0.95 for ratio in ratios) <= 1, "one of 57 MFLOP on 13 MB of images"
    assert ratios[len(ratios) // 2] > 1.1
    few = [row for row in times.rows if row.program().flops < 1e6]
    assert all(row.median_s[cold] > 1.3 * row.median_s[near] for row in few)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "foreplan.reuse/0"},
        {"distances": [1.0]},
        {"rows": []},
        {"rows": [{"op": "linear", "dims": {"rows": 1}, "variant": str(FP32), "median_s": [1.0]}]},
    ],
)
def test_broken_documents_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    document = json.loads(lzma.decompress(COMMITTED.read_bytes()))
    path = tmp_path / "x.json.xz"
    path.write_bytes(lzma.compress(json.dumps({**document, **change}).encode()))
    with pytest.raises(SpecError, match=r"x[.]json[.]xz"):
        ReuseTimes.load(path)
    path.write_bytes(b"no xz")
    with pytest.raises(SpecError, match="compressed document"):
        ReuseTimes.load(path)
