"""Chips that a virtual machine hides are told apart by family and model."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreplan.datasets.tir.target import _cpu_name


@pytest.mark.parametrize(
    ("name", "model", "chip"),
    [
        ("Intel(R) Xeon(R) Processor", 143, "Intel(R) Xeon(R) Processor family 6 model 143"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", 79, "Intel(R) Xeon(R) CPU @ 2.20GHz family 6 model 79"),
        # What records of before call by the bare name: they stay records of this chip.
        ("Intel(R) Xeon(R) Processor", 207, "Intel(R) Xeon(R) Processor"),
        ("AMD EPYC", 17, "AMD EPYC family 6 model 17"),
        ("Intel(R) Xeon(R) Platinum 8480+", 143, "Intel(R) Xeon(R) Platinum 8480+"),
    ],
)
def test_a_hidden_chip_has_family_and_model(
    tmp_path: Path, name: str, model: int, chip: str
) -> None:
    core = f"cpu family\t: 6\nmodel\t\t: {model}\nmodel name\t: {name}\nstepping\t: 1\n"
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{core}\nprocessor\t: 1\n{core}")
    assert _cpu_name(tmp_path / "cpuinfo") == chip
