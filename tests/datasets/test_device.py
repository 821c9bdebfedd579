import copy
import pickle
from pathlib import Path

import numpy as np
import pytest

from foreplan.datasets.device import FEATURE_NAMES, Device
from foreplan.datasets.specs import validate
from foreplan.errors import SpecError

CHIP = {"name": "x", "chip": "y", "vendor": "v", "kind": "cuda"}


def test_what_is_missing_is_none_and_nan() -> None:
    device = validate(
        Device,
        CHIP | {"peak_flops": {"fp16/matrix": "65 TFLOP/s", "fp16/vector": 16e12}, "units": 40},
        "d",
    )
    assert device.memory_bytes is None
    assert device.peak("fp16") == 65e12
    assert device.peak("bf16") is None
    vector = device.vector()
    assert len(vector.values) == len(vector.known) == len(FEATURE_NAMES)
    by_name = dict(zip(FEATURE_NAMES, vector.values, strict=True))
    assert by_name["peak_flops.fp16/vector"] == 16e12
    assert by_name["units"] == 40
    assert vector.known.sum() == 3
    assert np.array_equal(np.isnan(vector.values), ~vector.known)


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("memory_bytes", "16 GB/s", "d: memory_bytes: got '16 GB/s', expected a size"),
        ("memory_bytes", 0, "d: memory_bytes: got 0, expected greater than 0"),
        ("launch_overhead_s", 0, "d: launch_overhead_s: got 0, expected greater than 0"),
        ("units", -2, "d: units: got -2"),
        ("peak_flops", {"fp32/vector": 0}, "d: peak_flops.fp32/vector: got 0"),
        ("peak_flops", {"fp32/tensor": 1}, "d: peak_flops.fp32/tensor"),
        ("sources", {"l2": "x"}, "not 'l2'"),
        ("reread_bandwidth", [[4096, 1e9], [2048, 1e9]], "expected reread_bandwidth ascending"),
        ("reread_bandwidth", [], "expected reread_bandwidth ascending"),
        ("reread_bandwidth", [[4096, 0]], "d: reread_bandwidth[0][1]: got 0"),
        ("memory_bandwith", 1, "did you mean 'memory_bandwidth'?"),
        ("kind", "tpu", "d: kind: got 'tpu'"),
    ],
)
def test_refuses(field: str, value: object, line: str) -> None:
    with pytest.raises(SpecError) as caught:
        validate(Device, CHIP | {field: value}, "d")
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("figure", "told"),
    [
        ("memory_bandwidth: 500", "memory_bandwidth: got 500.0, .* its unit: 500 GB/s"),
        ("peak_flops: {bf16/matrix: 120}", "peak_flops.bf16/matrix: got 120.0, .* 120 TFLOP/s"),
        ("clock_hz: 2500", "clock_hz: got 2500.0, .* at least 1e.06 in SI units"),
        ("memory_bytes: 16", "memory_bytes: got 16.0, .* its unit: 16 GiB"),
        ("memory_bandwidth: 500 GB/s", None),
    ],
)
def test_a_file_in_other_units_is_refused(tmp_path: Path, figure: str, told: str | None) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("".join(f"{name}: {value}\n" for name, value in CHIP.items()) + figure)
    if told is None:
        assert Device.load(path).memory_bandwidth == 500e9
        return
    with pytest.raises(SpecError, match=told):
        Device.load(path)


def test_base_clock_below_boost() -> None:
    with pytest.raises(SpecError, match="base_clock_hz at most clock_hz"):
        validate(Device, CHIP | {"clock_hz": 1e9, "base_clock_hz": 2e9}, "d")


def test_unknown_data_type() -> None:
    with pytest.raises(SpecError, match="expected one of fp64, fp32"):
        validate(Device, CHIP, "d").peak("float32")


def test_hashes_copies_and_pickles() -> None:
    device = validate(Device, CHIP | {"peak_flops": {"fp32/vector": 1e12}}, "d")
    assert {device: 1}[copy.deepcopy(device)] == 1
    assert pickle.loads(pickle.dumps(device)) == device  # noqa: S301 - our own bytes
