"""`argument_words`: what the name of a kernel says of a call's numbers and indices.

An index that lies apart from its shape, an exponent or a mode decides which of torch's kernels
runs; shapes do not tell.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from foreplan.datasets.graphs.operator_call import described_tensors, row_strides

#: One index a row, expanded over its elements: rows are moved whole (``ScatterGatherChecks.h``,
#: ``can_use_expanded_index_path``). Else an index of each element, not along the last dimension.
WHOLE_ROWS: Final = "_of_rows"
PLACES: Final = "_of_places"
#: What is scattered takes the place of what was there.
ALONE: Final = "_alone"
#: Of a bag of rows, or of what is scattered, the largest is kept, or the mean, or the product.
LARGEST: Final = "_of_largest"
MEANS: Final = "_of_means"
PRODUCTS: Final = "_of_products"
#: Powers that are no products, roots or quotients; those whose derivatives are; square roots; and a
#: number to the power of each element.
POWERS: Final = "_by_logarithms"
EXPONENTS: Final = "_of_exponents"
FOURTHS: Final = "_of_fourths"
ROOTS: Final = "_of_roots"
#: Draws that put back what they drew.
REPEATED: Final = "_repeated"
#: Slopes that are drawn, in training.
DRAWN: Final = "_drawn"
#: Searches among more boundaries than a loop foretells.
MANY: Final = "_in_many"
#: Pads that repeat what they pad.
REFLECTED: Final = "_reflected"
#: Scans in steps of which more follow on each other than the cache lines hold that they fall on.
CROWDED: Final = "_in_few_sets"
#: Every word here, the last one of a name first.
ARGUMENT_WORDS: Final = (
    WHOLE_ROWS, PLACES, ALONE, LARGEST, MEANS, PRODUCTS, POWERS, EXPONENTS, FOURTHS, ROOTS,
    REPEATED, DRAWN, MANY, REFLECTED, CROWDED,
)  # fmt: skip

_INDEXED = frozenset({"gather", "scatter", "scatter_add", "scatter_reduce"})
_REDUCED: Mapping[str, str] = MappingProxyType(
    {"amax": LARGEST, "amin": LARGEST, "mean": MEANS, "prod": PRODUCTS, "sum": ""}
)
#: Elements of the narrowest rows that are written whole (see there).
_WIDE_ROWS = 16
#: Of ``embedding_bag``, by its number.
_LARGEST_MODE = 2
#: Exponents for which torch multiplies, divides or takes a root (``PowKernel.cpp``).
_QUICK_POWERS = frozenset({-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0})
#: Boundaries from which on a search is one among many (assumed: between 30 and 1024).
_MANY_BOUNDARIES = 192


def argument_words(name: str, arguments: str) -> str:
    """Words behind the name of a kernel; none of most operators.

    Args:
        name: of the operator, without its namespace and overload.
        arguments: of the call, as `OperatorCall` has them.
    """
    positional, named = json.loads(arguments)
    name = name.removesuffix("_")  # in place
    if name in _INDEXED:
        return _scattered(name, positional, named) + _index_word(name, positional, arguments)
    if name == "embedding_bag":
        return LARGEST * bool(positional[4:5] == [_LARGEST_MODE])
    if name == "pow":
        return _power(positional[0], positional[1])
    if name == "multinomial":
        again = positional[2] if len(positional) > 2 else named.get("replacement", False)
        return REPEATED * bool(again and positional[1] > 1)
    if name == "rrelu":
        drawn = positional[3] if len(positional) > 3 else named.get("training", False)
        return DRAWN * bool(drawn)
    if name in ("searchsorted", "bucketize"):
        bounds = described_tensors(arguments)[0 if name == "searchsorted" else 1][0]
        return MANY * (bool(bounds) and bounds[-1] >= _MANY_BOUNDARIES)
    if name == "pad":
        mode = positional[2] if len(positional) > 2 else named.get("mode", "constant")
        return REFLECTED * bool(mode != "constant")
    return ""


def _scattered(name: str, positional: list[Any], named: dict[str, Any]) -> str:
    if name != "scatter_reduce":
        return ""
    how = positional[4] if len(positional) > 4 else named.get("reduce", "sum")
    return _REDUCED[str(how)] + ALONE * (not named.get("include_self", True))


def _index_word(name: str, positional: list[Any], arguments: str) -> str:
    shape, strides, _ = described_tensors(arguments)[1]
    last = len(shape) - 1
    dim = positional[1] % max(1, len(shape))
    if last < 1 or dim == last:
        return ""
    expanded = strides == [1] + [0] * last
    wide = name == "gather" or math.prod(shape[1:]) >= _WIDE_ROWS
    return WHOLE_ROWS if dim == 0 and expanded and wide and _lies(arguments) else PLACES


def _lies(arguments: str) -> bool:
    """Whether what is picked from or written to has its elements in the order of dimensions."""
    shape, strides, _ = described_tensors(arguments)[0]
    return list(strides) == list(row_strides(shape))


def _power(base: Any, exponent: Any) -> str:
    if not isinstance(base, dict):
        return EXPONENTS
    if isinstance(exponent, dict):
        return POWERS
    if exponent in (0.5, -0.5):
        return ROOTS
    if exponent in _QUICK_POWERS:
        return ""
    return FOURTHS if exponent - 1 in _QUICK_POWERS else POWERS
