"""`map_kernel`: a map's kernel in the words of operator tables, by what it computes."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final, NamedTuple

from foreplan.cost_models.lowering.copy_layout import APART, DENSE, REORDERED
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
_OPERANDS = MappingProxyType({APART: 3, REORDERED: 4})
#: Bytes that a thread copies at once where rows are multiples of them (``Shape.cu``).
_VECTOR_BYTES = 16


class MapKernel(NamedTuple):
    """A map's kernel.

    Attributes:
        strided: as `operator_table.KINDS` has it.
        function: of `MAP_FUNCTIONS`; 0 of what no sweep timed by name.
    """

    strided: int
    function: int


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
    lies = 0
    if name not in _ALIKE:
        word = next((word for word in _OPERANDS if name.endswith(word)), "")
        name, lies = name.removesuffix(word).removesuffix("_"), _OPERANDS.get(word, 0)
    if name in PADS:
        # By nothing it is a plain map.
        return MapKernel(3, MAP_FUNCTIONS["pad"]) if inputs > 1 else MapKernel(0, _PLAIN)
    name = _ALIKE.get(name, name)
    if name in _BY_NUMBER and inputs == 1:
        name = "mul"
    if name == "cat" and item.dims["cols"] * DTYPE_BYTES[item.variant.compute] % _VECTOR_BYTES:
        name = "cat_unaligned"
    return MapKernel(_STRIDED.get(name, lies), MAP_FUNCTIONS.get(name, 0))
