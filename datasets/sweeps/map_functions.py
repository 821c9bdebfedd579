"""`MAP_FUNCTIONS`: functions of elements that sweeps time by name, and copies by their layout.

A row of an operator table says by a number which it is (`operator_table.KINDS`, ``function``).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

#: From what takes least arithmetic an element to what takes most, as an H200 takes longer for each
#: in 16 bits (``datasets/measured/h200_operators_graph_functions.parquet``); a plain copy, which
#: torch hands to the driver, stands apart, and copies into another order behind it, then what puts
#: rows in order, and gradients of softmaxes, which go through rows.
_ORDER: Final = (
    "mul", "add", "neg", "relu", "leaky_relu", "sub", "div", "pow", "rsqrt", "sqrt", "exp",
    "threshold_backward", "leaky_relu_backward", "hardtanh_backward", "hardtanh", "hardsigmoid",
    "hardswish", "elu", "addcmul", "where", "sigmoid_backward", "tanh_backward",
    "hardswish_backward", "silu_backward", "tanh", "sigmoid", "silu", "gelu_tanh",
    "gelu_tanh_backward", "cos", "gelu", "gelu_backward", "native_dropout_backward",
    "native_dropout", "softplus", "clone", "cat", "cat_halves", "cat_unaligned",
    "permuted", "transposed", "channels_last", "cat_heads", "pad", "cumsum", "topk", "sort",
    "log_softmax_backward", "softmax_backward",
)  # fmt: skip

#: Name to number, from 1 on; 0 is a function of which nothing is known.
MAP_FUNCTIONS: Mapping[str, int] = MappingProxyType(
    {name: number for number, name in enumerate(_ORDER, start=1)}
)
