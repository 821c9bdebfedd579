"""Kernels of maps in the words of operator tables, and what an H200 takes for them."""

from __future__ import annotations

import pytest

from foreplan.cost_models.lowering.map_kernel import is_map, map_kernel
from foreplan.cost_models.predictor import Predictor
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.sweeps.map_functions import MAP_FUNCTIONS


def a_map(kernel: str, *, rows: int = 8192, cols: int = 2048, inputs: int = 1) -> Program:
    variant = Variant("bf16", "bf16", f"torch.{kernel}")
    return program("elementwise", variant, rows=rows, cols=cols, inputs=inputs)


@pytest.mark.parametrize(
    ("kernel", "inputs", "strided", "function"),
    [
        ("gelu", 1, 0, "gelu"), ("gelu_tanh", 1, 0, "gelu_tanh"), ("add_", 2, 0, "add"),
        ("backward", 2, 0, "mul"), ("div", 1, 0, "mul"), ("div", 2, 0, "div"),
        ("neg_apart", 1, 3, "neg"), ("add_reordered", 2, 4, "add"),
        ("contiguous", 1, 3, "permuted"),
        ("clone_dense", 1, 0, "clone"), ("cat", 1, 3, "cat"), ("cat_apart", 1, 3, "cat_heads"),
        ("contiguous_transposed", 1, 1, "transposed"), ("pad", 2, 3, "pad"), ("pad", 1, 0, "mul"),
        ("reshape_channels_last", 1, 1, "channels_last"), ("copy_", 1, 3, "permuted"),
    ],
)  # fmt: skip
def test_kernels_are_asked_as_what_was_timed(
    kernel: str, inputs: int, strided: int, function: str
) -> None:
    found = map_kernel(a_map(kernel, inputs=inputs))
    assert found[:2] == (strided, MAP_FUNCTIONS[function])


@pytest.mark.parametrize(
    ("kernel", "inputs", "found"),
    [
        ("mul_by_row", 1, (0, 0, 1, 0)), ("mul_by_column", 1, (0, 0, 2, 0)),
        ("mul_by_block", 1, (0, MAP_FUNCTIONS["mul"], 3, 0)),
        ("mul_apart_by_block", 1, (3, MAP_FUNCTIONS["mul"], 3, 0)),
        ("add_across", 2, (5, MAP_FUNCTIONS["add"], 0, 0)),
        ("mul_mixed_by_column", 1, (0, MAP_FUNCTIONS["mul"], 2, 2)),
        ("mul_apart_converted_by_block", 1, (3, MAP_FUNCTIONS["mul"], 3, 1)),
        ("to", 1, (0, 0, 0, 1)), ("maximum_by_block", 1, (0, 0, 3, 0)),
        ("sort", 1, (0, 0, 0, 0)), ("topk", 1, (0, MAP_FUNCTIONS["topk"], 0, 0)),
    ],
)  # fmt: skip
def test_words_behind_a_kernel_are_marks_of_tables(
    kernel: str, inputs: int, found: tuple[int, ...]
) -> None:
    assert map_kernel(a_map(kernel, inputs=inputs)) == found


def test_rows_that_are_no_vectors_are_joined_by_another_kernel() -> None:
    assert map_kernel(a_map("cat", cols=2044)).function == MAP_FUNCTIONS["cat_unaligned"]
    assert map_kernel(a_map("softmax_of_nobody"))[:2] == (0, 0)
    assert [is_map(name) for name in ("add_", "rsub", "erf")] == [True, True, False]


def test_functions_of_many_steps_and_operands_that_lie_apart_take_longer() -> None:
    names = ("relu", "gelu", "softplus", "relu_apart", "cat", "cat_apart", "contiguous_transposed")
    found = Predictor.load().predict([a_map(name) for name in names], "h200")
    relu, gelu, softplus, apart, cat, heads, turned = (price.mean_s for price in found)
    # Measured of 400 MB and more in BF16: 0.94, 1.27, 1.89, 2.68, 1.06, 4.3 and 7.0 ns a thousand.
    assert 1.2 * relu < gelu < 1.5 * relu
    assert 1.8 * relu < softplus < 2.3 * relu < apart < 3.5 * relu
    assert 3 * cat < heads < 6 * cat
    assert 5 * relu < turned < 10 * relu
