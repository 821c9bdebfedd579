"""`map_kernel`: a map's kernel in the words of operator tables, by what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from foreplan.cost_models.lowering.argument_words import ARGUMENT_WORDS
from foreplan.cost_models.lowering.backward_steps import BY_BLOCK, BY_COLUMN, BY_ROW, NARROW
from foreplan.cost_models.lowering.copy_layout import (
    ACROSS,
    APART,
    CONVERTED,
    DENSE,
    MIXED,
    REORDERED,
    ZIPPED,
)
from foreplan.cost_models.lowering.gradient_maps import PADS
from foreplan.datasets.dtypes import DTYPE_BYTES
from foreplan.datasets.program import CHANNELS_LAST, TRANSPOSED, Program
from foreplan.datasets.sweeps.map_functions import MAP_FUNCTIONS

#: A GELU by its approximation.
TANH: Final = "_tanh"

_COPIES = ("clone", "contiguous", "reshape")
#: Kernels by the function that sweeps time in their place. Gradients without a name of their own
#: are products and sums, which take alike; copies without a word are into another order.
_ALIKE = MappingProxyType(
    {
        "backward": "mul", "sin": "cos", "rsub": "sub", "stack": "cat",
        **{f"dropout{part}": f"native_dropout{part}" for part in ("", "_backward")},
        **{f"{name}{APART}": "cat_heads" for name in ("cat", "stack")},
        **{f"{name}{ZIPPED}": "cat" for name in ("cat", "stack")},
        **dict.fromkeys((*_COPIES, "repeat", "copy"), "permuted"),
        **{f"{name}{TRANSPOSED}": "transposed" for name in _COPIES},
        **{f"{name}{CHANNELS_LAST}": "channels_last" for name in _COPIES},
        **{f"{name}{DENSE}": "clone" for name in _COPIES},
    }
)  # fmt: skip
_PLAIN = MAP_FUNCTIONS["mul"]
#: With a number they are a product or a sum.
_BY_NUMBER = frozenset({"sub", "div"})
#: How copies lie, as `operator_table.KINDS` has it, and operands of other maps by their words.
_STRIDED = MappingProxyType(
    {"transposed": 1, "channels_last": 1}
    | dict.fromkeys(("permuted", "cat", "cat_unaligned", "cat_heads", "pad"), 3)
)
_OPERANDS = MappingProxyType({APART: 3, REORDERED: 4, ACROSS: 5})
#: Kernels that write another data type than they read, and what maps of two types say of it.
_CONVERTS = frozenset({"to", "_to_copy"})
_TYPES = MappingProxyType({CONVERTED: 1, MIXED: 2})
#: How a broadcast operand lies, as the sweep inside CUDA graphs numbers it.
_LIES = MappingProxyType({BY_ROW: 1, BY_COLUMN: 2, BY_BLOCK: 3})
#: Bytes that a thread copies at once where rows are multiples of them (``Shape.cu``).
_VECTOR_BYTES = 16


class MapKernel(NamedTuple):
    """A map's kernel.

    Attributes:
        strided: as `operator_table.KINDS` has it.
        function: of `MAP_FUNCTIONS`; 0 of what no sweep timed by name.
        broadcast: as `operator_table.KINDS` has it.
        converts: likewise.
    """

    strided: int
    function: int
    broadcast: int = 0
    converts: int = 0


def is_map(name: str) -> bool:
    """Whether a sweep timed an operator by its name, or one alike, on operands that lie apart."""
    name = name.removesuffix("_")
    return name in MAP_FUNCTIONS or name in ("sin", "rsub")


def map_kernel(item: Program) -> MapKernel:
    """What is known of an elementwise program's kernel.

    Args:
        item: an elementwise program, or dropout; a pad that adds nothing has one input.
    """
    name, inputs = item.variant.kernel.removeprefix("torch."), item.dims.get("inputs", 1)
    if name in _CONVERTS:
        return MapKernel(0, 0, converts=1)
    name, broadcast = _last_word(name, _LIES)
    name = name.removesuffix(NARROW)
    name, converts = _last_word(name, _TYPES)
    lies = 0
    if name not in _ALIKE:
        name, lies = _last_word(name, _OPERANDS)
        name = name.removesuffix("_")
    for word in ARGUMENT_WORDS:  # which decide nothing on a GPU
        name = name.removesuffix(word)
    if broadcast and not converts and broadcast != _LIES[BY_BLOCK]:
        return MapKernel(0, 0, broadcast)  # as sweeps have rows and columns
    if name in PADS:
        # By nothing it is a plain map.
        return MapKernel(3, MAP_FUNCTIONS["pad"]) if inputs > 1 else MapKernel(0, _PLAIN)
    name = _ALIKE.get(name, name)
    if name in _BY_NUMBER and inputs == 1:
        name = "mul"
    if name == "cat" and item.dims["cols"] * DTYPE_BYTES[item.variant.compute] % _VECTOR_BYTES:
        name = "cat_unaligned"
    # A program of a sort has as many elements as it compares.
    function = 0 if name == "sort" else MAP_FUNCTIONS.get(name, 0)
    if broadcast and not function:
        return MapKernel(0, 0, broadcast)
    return MapKernel(_STRIDED.get(name, lies), function, broadcast, converts)


def _last_word(name: str, words: Mapping[str, int]) -> tuple[str, int]:
    """A name without the word that it ends in, and that word's number; 0 without one."""
    word = next((word for word in words if name.endswith(word)), "")
    return name.removesuffix(word), words.get(word, 0)
