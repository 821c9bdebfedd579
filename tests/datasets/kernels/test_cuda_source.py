"""This project's own kernels: what is compiled, and a host that cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foreplan.datasets.kernels import (
    _expert_routes,
    _fp8_linear,
    _fragment_linear,
    _fragment_rows,
    _row_maps,
    _token_attention,
)
from foreplan.datasets.kernels._cuda_source import cuda_kernel
from foreplan.datasets.kernels.row_shapes import RowShape
from foreplan.errors import MissingDataError


def test_macros_stand_before_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, ...]] = []

    def compiled(*given: str, compute_capability: str | None) -> None:
        asked.append((*given, str(compute_capability)))

    monkeypatch.setattr(torch.cuda, "_compile_kernel", compiled)
    file = tmp_path / "k.cu"
    file.write_text("void NAME() {}\n")
    cuda_kernel(file, "k_4", {"BITS": 4, "NAME": "k_4"})
    cuda_kernel(file, "k", {}, architecture="90a")
    assert asked == [
        ("#define BITS 4\n#define NAME k_4\nvoid NAME() {}\n", "k_4", "None"),
        ("void NAME() {}\n", "k", "90a"),
    ]


def test_a_host_without_a_compiler_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: str, compute_capability: str | None) -> None:
        raise OSError("Could not find any NVRTC library")

    monkeypatch.setattr(torch.cuda, "_compile_kernel", none)
    for compile_kernels in (  # what was compiled before is kept otherwise
        lambda: _fragment_linear.compiled.__wrapped__(4, 1, 1, 2, 2),
        lambda: _fragment_rows.compiled.__wrapped__(4, RowShape(1, 1, 1, 4)),
        lambda: _expert_routes._compiled.__wrapped__("add_up"),
    ):
        with pytest.raises(MissingDataError, match=r"NVRTC, .*nvidia-cuda-nvrtc"):
            compile_kernels()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs NVRTC")
@pytest.mark.parametrize("architecture", ["80", "86", "89", "90"])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_kernels_for_few_rows_are_made_for_older_gpus_too(bits: int, architecture: str) -> None:
    from torch.cuda._utils import _nvrtc_compile

    file = Path(_fragment_linear.__file__).with_suffix(".cu")
    macros = {"BITS": bits, "NT": 2, "MT": 2, "KW": 4, "DEPTH": 2, "NAME": "k", "UNPACK": "u"}
    for grouped in (0, 1) if bits < 16 else (1,):
        given = macros | {"GROUPED": grouped}
        head = "".join(f"#define {name} {value}\n" for name, value in given.items())
        made, _ = _nvrtc_compile(head + file.read_text(), "k", compute_capability=architecture)
        assert made


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs NVRTC")
@pytest.mark.parametrize("architecture", ["89", "90", "100"])
def test_few_rows_of_fp8_are_multiplied_where_there_is_fp8(architecture: str) -> None:
    from torch.cuda._utils import _nvrtc_compile

    source = Path(_fragment_linear.__file__).with_suffix(".cu").read_text()
    macros = {"BITS": 16, "FP8": 1, "NT": 2, "MT": 2, "KW": 4, "DEPTH": 2}
    for grouped in (0, 1):
        given = macros | {"GROUPED": grouped, "NAME": "k", "UNPACK": "u"}
        head = "".join(f"#define {name} {value}\n" for name, value in given.items())
        made, _ = _nvrtc_compile(head + source, "k", compute_capability=architecture)
        assert made
    scales = Path(_fp8_linear.__file__).with_name("_fp8_scales.cu").read_text()
    made, _ = _nvrtc_compile(scales, "fp8_scales", compute_capability=architecture)
    assert made


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs NVRTC")
@pytest.mark.parametrize("architecture", ["80", "86", "89", "90", "100", "120"])
def test_kernels_of_decoding_are_made_for_every_gpu_that_takes_them(architecture: str) -> None:
    from torch.cuda._utils import _nvrtc_compile

    source = Path(_token_attention.__file__).with_suffix(".cu").read_text()
    for features, bits in ((64, 8), (96, 16), (128, 16), (256, 8)):
        given = {"D": features, "BITS": bits, "WARPS": 8, "SHARES": 256}
        macros = given | {"NAME": "k", "COMBINE": "c"}
        head = "".join(f"#define {name} {value}\n" for name, value in macros.items())
        made, _ = _nvrtc_compile(head + source, "k", compute_capability=architecture)
        assert made
    rows = Path(_row_maps.__file__).with_suffix(".cu").read_text()
    made, _ = _nvrtc_compile(rows, "rotated", compute_capability=architecture)
    assert made
