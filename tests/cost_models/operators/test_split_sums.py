"""Whose sums are split: cuBLAS's, of products that are no batches."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.cost_models.operators.split_sums import splits_sums
from foreplan.datasets.sweeps.operator_table import operator_table, texts


@pytest.mark.parametrize(
    ("library", "kind", "dtype", "splits"),
    [
        ("torch-2.1-cuda", "linear", "fp32", True),
        ("torch-2.1-cuda", "bmm", "fp32", False),
        ("sglang", "linear", "bfloat16", True),
        ("sglang", "linear", "fp8", False),
        ("trtllm", "linear", "fp8", True),
        ("trtllm", "linear", "fp8_block", False),
        ("trtllm", "linear", "int4_wo", False),
        ("trtllm", "linear", "sq", False),
    ],
)
def test_only_cublas_splits_sums(library: str, kind: str, dtype: str, splits: bool) -> None:
    table = operator_table(
        op=texts([kind]), kind=texts([kind]), dtype=texts([dtype]), library=texts([library]),
        device=texts(["h100_sxm"]),
        dims={name: np.array([64.0]) for name in ("b", "m", "n", "k")},
        latency_s=np.array([np.nan]),
    )  # fmt: skip
    assert splits_sums(table).tolist() == [splits]
