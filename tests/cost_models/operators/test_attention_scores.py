"""Features of scores that something is added to: laws, and which attention is written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from foreplan.cost_models.operators.operator_features import features
from foreplan.datasets.sweeps.operator_table import OperatorTable, operator_table, texts

SIZES = {"b": 4, "queries": 256, "keys": 256 + 127, "heads": 8, "kv_heads": 8, "head_dim": 64}


def attention(
    dtype: str = "bfloat16", kind: str = "context_attention", **dims: int
) -> OperatorTable:
    size = {**SIZES, **dims}
    return operator_table(
        op=texts([kind]), kind=texts([kind]), dtype=texts([f"{dtype}/{dtype}"]),
        library=texts(["torch_graph-2.11-cuda"]), device=texts(["h200"]),
        dims={name: np.array([float(value)]) for name, value in size.items()},
        latency_s=np.array([np.nan]),
    )  # fmt: skip


def column(table: OperatorTable, name: str) -> float:
    found = features(table, "context")
    return float(found.values[0, found.names.index(name)])


def structural_s(table: OperatorTable) -> float:
    return float(features(table, "context").structural_s[0])


@pytest.mark.parametrize(
    ("case", "written"),
    [
        ({}, False),
        ({"masks": 8}, False),
        ({"masks": 8, "training": 1}, False),
        ({"masks": 8, "strided": 1}, True),
        ({"masks": 8, "kv_heads": 2}, False),
        ({"masks": 8, "kv_heads": 2, "training": 1}, True),
        ({"masks": 8, "kv_heads": 2, "dtype": "fp32"}, True),
        ({"kv_heads": 2}, False),
    ],
)
def test_scores_are_written_out_where_no_fused_kernel_takes_them(
    case: dict[str, Any], written: bool
) -> None:
    table = attention(**case)
    found = column(table, "written_out")
    assert found == written or (np.isnan(found) and not case.get("masks"))
    if written:
        fused = {name: value for name, value in case.items() if name == "dtype"}
        # FP32 operands are multiplied as fast either way.
        assert structural_s(table) > (1 if fused else 5) * structural_s(attention(**fused))


def test_a_larger_mask_moves_more_and_a_learned_one_has_a_gradient_of_every_score() -> None:
    def moved(**dims: int) -> float:
        table = attention(kind="context_attention_gradient", **dims)
        return float(features(table, "context").roofline_s[0])

    few = {"queries": 16, "keys": 16 + 7, "b": 4096}  # bound by memory
    steps = [
        moved(**few),
        moved(**few, masks=1),
        moved(**few, masks=8),
        moved(**few, masks=8 * 4096),
    ]
    assert steps == sorted(steps)
    assert steps[0] < steps[-1] < moved(**few, masks=8 * 4096, training=1)
    assert moved(**few, masks=8 * 4096, broadcast=1) < steps[-1]


def test_padding_counts_where_blocks_are_not_full() -> None:
    # 256 x 256 scores fill blocks of 64 x 64; 36 x 36 of them fill a third of one.
    assert column(attention(masks=8), "log_padded") == pytest.approx(0.0, abs=0.01)
    small = attention(masks=8, queries=36, keys=36 + 17)
    assert column(small, "log_padded") == pytest.approx(np.log(64**2 / 36**2), rel=0.05)
