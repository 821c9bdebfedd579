"""Torch devices that a user names."""

from __future__ import annotations

import pytest

from foreplan.datasets.torch_device import usable
from foreplan.errors import SpecError

pytest.importorskip("torch")


@pytest.mark.parametrize("name", ["banana", "cuda:99", "meta:x", ""])
def test_a_device_that_is_not_here_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=r"--torch-device: got .*, expected a device of this mach"):
        usable(name, "--torch-device")


def test_a_device_that_is_here_is_itself() -> None:
    assert usable("cpu", "--torch-device") == "cpu"
