"""The table of operators against torch's own count of FLOP, and laws of its formulas."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from foreplan.datasets.dtypes import DTYPE_BYTES
from foreplan.datasets.operators import OPERATORS, PRODUCTS
from foreplan.datasets.program import Variant

FP32 = Variant("fp32", "fp32", "any")
HEADS = {"batch": 2, "queries": 5, "keys": 9, "heads": 3, "head_dim": 8}
WINDOW = {"batch": 2, "groups": 2, "cin": 4, "cout": 6, "taps": 9, "inputs": 63, "outputs": 35}
IMAGE = {
    "batch": 2, "channels": 4, "height": 9, "width": 7, "filters": 6, "kernel_height": 3,
    "kernel_width": 3, "out_height": 7, "out_width": 5, "stride": 1, "groups": 2,
}  # fmt: skip


def convolve() -> object:
    return functional.conv2d(torch.ones(2, 4, 9, 7), torch.ones(6, 2, 3, 3), groups=2)


def attend() -> object:
    q, k = torch.ones(2, 3, 5, 8), torch.ones(2, 3, 9, 8)
    return (q @ k.transpose(2, 3)).softmax(dim=-1) @ k


@pytest.mark.parametrize(
    ("op", "dims", "call"),
    [
        ("linear", {"rows": 3, "n": 5, "k": 7}, lambda: torch.ones(3, 7) @ torch.ones(7, 5)),
        (
            "matmul",
            {"batch": 2, "m": 3, "n": 5, "k": 7},
            lambda: torch.bmm(torch.ones(2, 3, 7), torch.ones(2, 7, 5)),
        ),
        ("conv", WINDOW, convolve),
        ("conv2d_forward", IMAGE, convolve),
        ("full_attention", HEADS | {"kv_heads": 3}, attend),
        ("attention_forward", HEADS, attend),
    ],
)
def test_products_have_the_flop_that_torch_counts(
    op: str, dims: Mapping[str, int], call: Callable[[], object]
) -> None:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call()
    assert OPERATORS[op].flops(dims) == counter.get_total_flops() > 0


@given(st.integers(1, 12), st.integers(0, 12))
def test_causal_attention_counts_the_pairs_its_mask_leaves(queries: int, before: int) -> None:
    keys = queries + before
    pairs = sum(1 for q in range(queries) for k in range(keys) if k <= before + q)
    dims = {
        "batch": 1, "queries": queries, "keys": keys, "heads": 1, "kv_heads": 1, "head_dim": 1,
    }  # fmt: skip
    assert OPERATORS["attention"].flops(dims) == 4 * pairs


@pytest.mark.parametrize("op", sorted(OPERATORS))
def test_every_operator_moves_bytes_and_more_of_them_in_wider_types(op: str) -> None:
    dims = dict.fromkeys(OPERATORS[op].dims, 8)
    half = Variant("bf16", "bf16", "any")
    narrow, wide = OPERATORS[op].bytes(dims, half), OPERATORS[op].bytes(dims, FP32)
    assert OPERATORS[op].flops(dims) >= 0
    # An update of parameters is in FP32 whatever the arithmetic.
    share = 1.0 if op == "optimizer_step" else DTYPE_BYTES["bf16"] / DTYPE_BYTES["fp32"]
    masks = 8 * 8 if op == "dropout" else 0  # a byte each, whatever is dropped
    assert narrow > masks
    assert narrow - masks == pytest.approx((wide - masks) * share)


def test_every_product_is_an_operator() -> None:
    assert set(OPERATORS) > PRODUCTS


@pytest.mark.parametrize("op", sorted(op for op in OPERATORS if op.endswith("_backward")))
def test_a_backward_pass_is_two_products_of_the_forward_one(op: str) -> None:
    backward, forward = OPERATORS[op], OPERATORS[op.replace("_backward", "_forward")]
    dims = dict.fromkeys(backward.dims, 4)
    assert backward.flops(dims) == 2 * forward.flops(dims)
    assert backward.bytes(dims, FP32) == 2 * forward.bytes(dims, FP32)
