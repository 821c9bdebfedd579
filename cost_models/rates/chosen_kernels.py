"""What a processor takes for functions whose kernel a call's numbers or indices choose.

``torch.gather`` of whole rows copies them; by an index an element it goes through memory one by
one. A power of 2 is a product, one of 1.7 a logarithm and an exponential. What chooses stands in
the names of kernels (`argument_words`); figures are of elements beside moving them, in calls of the
device as in `slow_functions`, which has those that no number chooses.
"""

from __future__ import annotations

from types import MappingProxyType

from foreplan.cost_models.lowering.argument_words import (
    ALONE,
    ARGUMENT_WORDS,
    DRAWN,
    EXPONENTS,
    FOURTHS,
    LARGEST,
    MANY,
    MEANS,
    PLACES,
    POWERS,
    REFLECTED,
    REPEATED,
    ROOTS,
    WHOLE_ROWS,
)
from foreplan.cost_models.lowering.backward_steps import NARROW
from foreplan.cost_models.lowering.copy_layout import plain_kernel
from foreplan.datasets.device import Device
from foreplan.datasets.program import Program

#: Elements in the time of a call, by kernel and what it says. Measured in fp32 on one core of an
#: EPYC (Zen 5, 1.0 us a call; ``tests/benchmarks/processor_functions.py``): 1.0 ns an element that
#: an index of its own picks along another than the last dimension, 1.1 that it adds up, 0.1 of
#: whole rows, 2.3 of what takes another's place; 1.5 ns of powers by logarithms, 0.3 of square
#: roots; 0.6-1.1 of the values that several draws with replacement go through; 38-49 of a search
#: among 1,024 boundaries; 1.1-1.3 of the gradient of a pad that repeats.
_ELEMENTS = MappingProxyType(
    {
        ("gather", PLACES): 1050, ("gather", WHOLE_ROWS): 11000,
        ("gather_backward", PLACES): 950, ("scatter_add", PLACES): 950,
        ("scatter_reduce", PLACES): 870,
        ("pow", POWERS): 670, ("pow", FOURTHS): 670, ("pow", EXPONENTS): 670,
        ("pow", ROOTS): 3200,
        ("multinomial", REPEATED): 1200,
        ("rrelu", DRAWN): 181,
        ("searchsorted", MANY): 21, ("bucketize", MANY): 21,
        (f"pad{REFLECTED}_backward", ""): 780,
    }
)  # fmt: skip
#: Of what is written into a tensor, all that is written counts, not the result.
_WRITTEN = frozenset({"gather_backward", "scatter_add", "scatter_reduce"})
#: The same beside that of what is reduced place by place: 2.5 ns where what was there is cleared
#: first, 3.2 of the largest and 1.6 of means (five sizes by hand, rows of 1 to 64; the largest of
#: single elements half as long).
_REDUCED = MappingProxyType({ALONE: 400, LARGEST: 310, MEANS: 620})
#: Rows likewise that are added up one at a time: 5.9 ns beside their elements (20,000 of 16 and
#: 12,000 of 96).
_ADDED, _ROWS = frozenset({"index_add", "scatter_add", "scatter_reduce"}), 165
#: Elements likewise of operands of which an element meets 2 to 15 of the result: no vectors (0.2 ns
#: for 9, as filters that are modulated have).
_NARROW = 5000


def chosen_kernel_s(item: Program, device: Device, launch_s: float) -> float:
    """Seconds beside moving a function's tensors; 0 of all other work and devices.

    Args:
        item: what is asked for.
        device: its cores share the elements out.
        launch_s: seconds of one call on it.
    """
    if device.kind != "cpu" or item.op not in ("elementwise", "reduction"):
        return 0.0
    name, d = _name(item), item.dims
    count = d["rows"] * d["cols"]
    calls = count / _NARROW if NARROW in item.variant.kernel else 0.0
    if name in _WRITTEN or name in _ADDED:
        count *= max(1, d["inputs"] - 1)
    elements = _chosen(item)
    if elements is not None:
        calls += count / elements
        if PLACES in item.variant.kernel and name == "scatter_reduce":
            calls += sum(count / each for word, each in _REDUCED.items()
                         if word in item.variant.kernel)  # fmt: skip
    elif name in _ADDED:
        calls += count / d["cols"] / _ROWS
    return launch_s * calls / (device.units or 1)


def is_chosen(item: Program) -> bool:
    """Whether what a kernel says of a call's numbers decides its price."""
    return _chosen(item) is not None


def _name(item: Program) -> str:
    return plain_kernel(item.variant.kernel).removeprefix("torch.").removesuffix("_")


def _chosen(item: Program) -> int | None:
    name, kernel = _name(item), item.variant.kernel
    words = ["", *(word for word in ARGUMENT_WORDS if word in kernel)]
    return next((found for word in words if (found := _ELEMENTS.get((name, word)))), None)
