"""This project's own kernels: what is compiled, and a host that cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foreplan.datasets.kernels import _expert_routes, _fragment_linear
from foreplan.datasets.kernels._cuda_source import cuda_kernel
from foreplan.errors import MissingDataError


def test_macros_stand_before_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(torch.cuda, "_compile_kernel", lambda *given: asked.append(given))
    file = tmp_path / "k.cu"
    file.write_text("void NAME() {}\n")
    cuda_kernel(file, "k_4", {"BITS": 4, "NAME": "k_4"})
    assert asked == [("#define BITS 4\n#define NAME k_4\nvoid NAME() {}\n", "k_4")]


def test_a_host_without_a_compiler_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: str) -> None:
        raise OSError("Could not find any NVRTC library")

    monkeypatch.setattr(torch.cuda, "_compile_kernel", none)
    for compile_kernels in (
        lambda: _fragment_linear.compiled(4, 1, 1, 2, 2),
        lambda: _expert_routes._compiled("add_up"),
    ):
        with pytest.raises(MissingDataError, match=r"NVRTC, .*nvidia-cuda-nvrtc"):
            compile_kernels()
