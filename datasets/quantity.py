"""Quantities: "16 GiB", "3.35 TB/s", "12 us" in, SI numbers inside, people's units out.

Every `Dimension` lists the units it takes. Decimal and binary prefixes are kept apart (a GB is
10^9 bytes, a GiB 2^30), bits are spelt out (``Gbit/s``, ``Gbps``) because ``Gb/s`` and ``GB/s``
differ by a shift key and a factor of eight. Prefixes: SI brochure, 9th edition; IEC 80000-13.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from enum import StrEnum
from typing import Annotated, Any, SupportsIndex

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from foreplan.errors import SpecError

_SI = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15}
_IEC = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50}

_BYTES: dict[str, Decimal] = {
    **{f"{prefix}B": Decimal(10) ** power for prefix, power in _SI.items()},
    **{f"{prefix}B": Decimal(2) ** power for prefix, power in _IEC.items()},
}
_BITS = {f"{prefix}bit": Decimal(10) ** power / 8 for prefix, power in _SI.items()}
_SECONDS = {
    "s": Decimal(1),
    "ms": Decimal("1e-3"),
    "us": Decimal("1e-6"),
    "µs": Decimal("1e-6"),  # micro sign
    "μs": Decimal("1e-6"),  # Greek mu, which keyboards give as often
    "ns": Decimal("1e-9"),
    "min": Decimal(60),
    "h": Decimal(3600),
}
_OPERATIONS = {
    f"{prefix}{name}": Decimal(10) ** power
    for prefix, power in _SI.items()
    for name in ("FLOP/s", "FLOPS", "OP/s", "OPS")
}


class Dimension(StrEnum):
    """What a quantity measures; the value names its SI unit."""

    BYTES = "bytes"
    BYTES_PER_SECOND = "bytes per second"
    SECONDS = "seconds"
    OPERATIONS_PER_SECOND = "FLOP/s"
    HERTZ = "hertz"
    WATTS = "watts"


_UNITS: Mapping[Dimension, Mapping[str, Decimal]] = {
    Dimension.BYTES: _BYTES,
    Dimension.BYTES_PER_SECOND: {
        **{f"{unit}/s": factor for unit, factor in (_BYTES | _BITS).items()},
        **{f"{prefix}bps": _BITS[f"{prefix}bit"] for prefix in _SI},
    },
    Dimension.SECONDS: _SECONDS,
    Dimension.OPERATIONS_PER_SECOND: _OPERATIONS,
    Dimension.HERTZ: {f"{prefix}Hz": Decimal(10) ** power for prefix, power in _SI.items()},
    Dimension.WATTS: {f"{p}W": Decimal(10) ** n for p, n in {"m": -3, "": 0, "k": 3}.items()},
}

_EXAMPLES: Mapping[Dimension, str] = {
    Dimension.BYTES: "a size such as 16 GiB, 16 GB or a plain number of bytes",
    Dimension.BYTES_PER_SECOND: (
        "a bandwidth such as 3.35 TB/s, 12 GiB/s, 25 Gbit/s or a plain number of bytes per second"
    ),
    Dimension.SECONDS: "a time such as 12 us, 3 ms, 1.5 s or a plain number of seconds",
    Dimension.OPERATIONS_PER_SECOND: (
        "a rate such as 312 TFLOP/s, 624 TOP/s or a plain number of operations per second"
    ),
    Dimension.HERTZ: "a frequency such as 1.41 GHz, 1410 MHz or a plain number of hertz",
    Dimension.WATTS: "a power such as 300 W or a plain number of watts",
}

# The exponent is bounded so that no text makes a number of a billion digits.
_QUANTITY = re.compile(
    r"\s*(?P<number>[-+]?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(?:[eE][-+]?[0-9]{1,3})?)"
    r"\s*(?P<unit>[^\s0-9.+-](?:.*\S)?)?\s*"
)


def parse_quantity(value: object, dimension: Dimension, where: str = "quantity") -> float:
    """Read a quantity.

    Args:
        value: a text with a unit, or a number that is in SI units already.
        dimension: what it has to measure.
        where: file and field, for the error.

    Returns:
        The SI number: bytes, bytes per second, seconds, operations per second, hertz, watts.

    Raises:
        SpecError: another dimension ("16 GB" for a bandwidth), no unit in a text, an unknown unit,
            a negative number, NaN or infinity.
    """
    number = _number(value, dimension)
    if number is None or not math.isfinite(number) or number < 0:
        raise SpecError(
            where, got=value, expected=_EXAMPLES[dimension], fix=_hint(value, dimension)
        )
    return number


def _number(value: object, dimension: Dimension) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return None
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None or match["unit"] is None:
        return None
    factor = _UNITS[dimension].get(match["unit"])
    # Decimal, so that "3.35 TB/s" is the float nearest to 3.35e12 and not a rounding away.
    return None if factor is None else float(Decimal(match["number"]) * factor)


def _hint(value: object, wanted: Dimension) -> str | None:
    """Say what an unfit unit measures, if it measures something."""
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    unit = match["unit"] if match else None
    if match is not None and unit is None:
        return "give the unit"
    if unit is None:
        return None
    if unit in _UNITS[wanted]:
        return None  # the number is at fault
    for dimension, units in _UNITS.items():
        if unit in units:
            return f"{unit!r} is a unit of {dimension.value}"
    if re.fullmatch(r"[kmgtpKMGTP]?[bB](/s|ps)?", unit) and "b" in unit:
        return "write bytes with a B (GB) and bits in full (Gbit)"
    like = [name for units in _UNITS.values() for name in units if name.lower() == unit.lower()]
    return f"did you mean {like[0]!r}?" if like else None


# ----------------------------------------------------------------------------- pydantic's fields


@dataclass(frozen=True, slots=True)
class _Text:
    """Lets a field take a text with a unit too, and says so in the JSON Schema."""

    dimension: Dimension
    whole: bool = False

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._read, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        if handler.mode == "serialization":
            return handler(schema)
        number = "integer" if self.whole else "number"
        forms = [{"type": number, "minimum": 0}, {"type": "string"}]
        return {"anyOf": forms, "description": _EXAMPLES[self.dimension]}

    def _read(self, value: Any) -> Any:
        try:
            number = parse_quantity(value, self.dimension)
        except SpecError as error:
            hint = "" if error.fix is None else f" ({error.fix})"
            # pydantic adds the field and the value; its messages treat braces as fields.
            raise PydanticCustomError(
                "quantity", "{expected}", {"expected": error.expected + hint}
            ) from error
        if not self.whole:
            return number
        return value if isinstance(value, int) else round(number)


Bytes = Annotated[int, _Text(Dimension.BYTES, whole=True), Field(gt=0, lt=1 << 60)]
"""A positive size in whole bytes; bounded, so that it fits every plan and every reader."""
BytesPerSecond = Annotated[float, _Text(Dimension.BYTES_PER_SECOND), Field(gt=0)]
"""A positive bandwidth in bytes per second."""
Seconds = Annotated[float, _Text(Dimension.SECONDS), Field(ge=0)]
"""A time in seconds, zero allowed."""
OperationsPerSecond = Annotated[float, _Text(Dimension.OPERATIONS_PER_SECOND), Field(gt=0)]
"""A positive rate in FLOP/s (integer types: OP/s)."""
Hertz = Annotated[float, _Text(Dimension.HERTZ), Field(gt=0)]
"""A positive frequency in hertz."""
Watts = Annotated[float, _Text(Dimension.WATTS), Field(gt=0)]
"""A positive power in watts."""


# ------------------------------------------------------------------------------------ for people


def format_bytes(size: float) -> str:
    """Write a size in binary units, to four digits: ``16 GiB``. Parses back as bytes."""
    return _scaled(size, [("B", 1.0)] + [(f"{p}B", 2.0**power) for p, power in _IEC.items()])


def format_bandwidth(bytes_per_second: float) -> str:
    """Write a bandwidth in decimal units, as vendors do, to four digits: ``3.35 TB/s``."""
    return _scaled(bytes_per_second, [(f"{p}B/s", 10.0**power) for p, power in _SI.items()])


def format_rate(operations_per_second: float) -> str:
    """Write a rate to four digits: ``312 TFLOP/s``."""
    return _scaled(operations_per_second, [(f"{p}FLOP/s", 10.0**n) for p, n in _SI.items()])


def whole_number(value: object, where: str) -> int:
    """An argument of a notebook, unseen by a type checker, as a whole number; NumPy's count.

    Args:
        value: what was given.
        where: what to call it in an error.

    Raises:
        SpecError: something else, ``True`` or ``2.0`` for instance.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise SpecError(where, got=value, expected="a whole number")
    return operator.index(value)


def format_seconds(seconds: float) -> str:
    """Write a time to four digits, at most in seconds: ``12 us``, ``3.4 ms``, ``95 s``."""
    return _scaled(seconds, [("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1.0)])


def format_bound(value: float, digits: int, *, above: bool) -> str:
    """Write a limit that may be given as it stands: rounded up if ``above``, else down."""
    way = ROUND_CEILING if above else ROUND_FLOOR
    rounded = Context(prec=digits, rounding=way).create_decimal_from_float(value)
    return f"{float(rounded):.{digits}g}"


def _scaled(value: float, units: list[tuple[str, float]]) -> str:
    """Use the largest unit that leaves at least one; ``units`` ascend."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {'s' if units[-1][0] == 's' else units[0][0]}"
    name, factor = units[0]
    for candidate, size in units[1:]:
        # Four digits first: 0.99999 ms is "1 ms", never "1000 us".
        if float(f"{abs(value) / size:.4g}") >= 1:
            name, factor = candidate, size
    scaled = value / factor
    digits = f"{scaled:.0f}" if abs(scaled) >= 1000 else f"{scaled:.4g}"
    return f"{digits} {name}"
