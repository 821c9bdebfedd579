import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.datasets.quantity import (
    Bytes,
    BytesPerSecond,
    Dimension,
    format_bandwidth,
    format_bound,
    format_bytes,
    format_rate,
    format_seconds,
    parse_quantity,
)
from foreplan.datasets.specs import StrictModel, validate
from foreplan.errors import SpecError

D = Dimension


@pytest.mark.parametrize(
    ("text", "dimension", "number"),
    [
        ("16 GiB", D.BYTES, 2**34),
        ("16GB", D.BYTES, 16e9),
        ("1.5 MiB", D.BYTES, 1572864),
        (17179869184, D.BYTES, 2**34),
        ("3.35 TB/s", D.BYTES_PER_SECOND, 3.35e12),
        ("25 Gbit/s", D.BYTES_PER_SECOND, 3.125e9),
        ("100 Gbps", D.BYTES_PER_SECOND, 12.5e9),
        ("12 GiB/s", D.BYTES_PER_SECOND, 12 * 2**30),
        ("12 us", D.SECONDS, 12e-6),
        ("12µs", D.SECONDS, 12e-6),  # micro sign
        ("12 μs", D.SECONDS, 12e-6),  # Greek letter
        ("1e-3 s", D.SECONDS, 1e-3),
        (0, D.SECONDS, 0),
        ("312 TFLOPS", D.OPERATIONS_PER_SECOND, 312e12),
        ("624 TOP/s", D.OPERATIONS_PER_SECOND, 624e12),
        ("1.41 GHz", D.HERTZ, 1.41e9),
        ("300 W", D.WATTS, 300),
    ],
)
def test_reads(text: object, dimension: Dimension, number: float) -> None:
    assert parse_quantity(text, dimension) == number


@pytest.mark.parametrize(
    ("text", "dimension", "hint"),
    [
        ("16 GB", D.BYTES_PER_SECOND, "'GB' is a unit of bytes"),
        ("16 GB/s", D.BYTES, "'GB/s' is a unit of bytes per second"),
        ("16", D.BYTES, "give the unit"),
        ("16 Gb", D.BYTES, "bits in full"),
        ("16 gb/s", D.BYTES_PER_SECOND, "bits in full"),
        ("1.4 ghz", D.HERTZ, "did you mean 'GHz'?"),
        ("-3 s", D.SECONDS, "expected a time"),
        ("3 parsec", D.SECONDS, "expected a time"),
        ("1e999 s", D.SECONDS, "expected a time"),
        ("1,000 B", D.BYTES, "expected a size"),
        ("", D.BYTES, "expected a size"),
        (True, D.BYTES, "expected a size"),
        (None, D.BYTES, "expected a size"),
        (-1, D.BYTES, "expected a size"),
        (math.nan, D.BYTES, "expected a size"),
        (math.inf, D.BYTES, "expected a size"),
        (10**400, D.BYTES, "expected a size"),
    ],
)
def test_refuses(text: object, dimension: Dimension, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_quantity(text, dimension, "c.yaml: f")
    assert str(caught.value).startswith("c.yaml: f: got ")
    assert hint in str(caught.value)


@given(st.integers(1, 10**18))
def test_bytes_read_back(size: int) -> None:
    text = format_bytes(size)
    assert parse_quantity(text, D.BYTES) == pytest.approx(size, rel=6e-4)
    assert 1 <= float(text.split()[0]) < 1024 or size >= 2**60


@given(st.floats(1e-9, 1e6))
def test_seconds_read_back(seconds: float) -> None:
    text = format_seconds(seconds)
    assert parse_quantity(text, D.SECONDS) == pytest.approx(seconds, rel=6e-4)


@given(st.floats(1, 1e17))
def test_rates_read_back(rate: float) -> None:
    assert parse_quantity(format_bandwidth(rate), D.BYTES_PER_SECOND) == pytest.approx(
        rate, rel=1e-3
    )
    assert parse_quantity(format_rate(rate), D.OPERATIONS_PER_SECOND) == pytest.approx(
        rate, rel=1e-3
    )


@given(st.integers(0, 10**6), st.sampled_from(["B", "kB", "MB", "GB", "KiB", "MiB", "GiB"]))
def test_decimal_and_binary_units_are_exact_and_apart(number: int, unit: str) -> None:
    factor = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
    factor |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    assert parse_quantity(f"{number} {unit}", D.BYTES) == number * factor[unit]


def test_formats() -> None:
    assert format_bytes(2**34) == "16 GiB"
    assert format_bytes(1048575) == "1 MiB"
    assert format_bytes(-5 * 2**20) == "-5 MiB"
    assert format_bytes(0) == "0 B"
    assert format_seconds(12e-6) == "12 us"
    assert format_seconds(0.00099999) == "1 ms"
    assert format_seconds(0) == "0 s"
    assert format_seconds(3600) == "3600 s"
    assert format_bandwidth(3.35e12) == "3.35 TB/s"
    assert format_rate(312e12) == "312 TFLOP/s"


class Spec(StrictModel):
    size: Bytes = 1
    speed: BytesPerSecond = 1.0


@given(st.floats(1e-9, 1e12), st.integers(1, 6))
def test_a_bound_may_be_given_as_it_is_written(value: float, digits: int) -> None:
    low, high = (float(format_bound(value, digits, above=above)) for above in (False, True))
    assert low <= value <= high
    assert high - low <= 10.0 ** (1 - digits) * value * (1 + 1e-9)


def test_fields() -> None:
    spec = validate(Spec, {"size": "16 GiB", "speed": "25 Gbit/s"}, "s")
    assert (spec.size, spec.speed) == (2**34, 3.125e9)
    assert isinstance(spec.size, int)
    properties = Spec.model_json_schema()["properties"]
    assert [form["type"] for form in properties["size"]["anyOf"]] == ["integer", "string"]
    assert Spec(size=2**53 + 1).size == 2**53 + 1  # no detour through a float
    with pytest.raises(SpecError, match=r"s: size: got '16 GB/s', expected a size .* bytes per se"):
        validate(Spec, {"size": "16 GB/s"}, "s")
    # No plan's figures hold more: planning would end in the middle, after a profile was taken.
    with pytest.raises(SpecError, match=r"s: size: got .* expected less than 1152921504606846976"):
        validate(Spec, {"size": "1e30 GiB"}, "s")
    with pytest.raises(SpecError, match="s: speed: got 0, expected greater than 0"):
        validate(Spec, {"speed": 0}, "s")
