import json
import os
from pathlib import Path
from typing import Any

import pytest

from foreplan.datasets import device_zoo
from foreplan.errors import SpecError

ALL = device_zoo.names()
T = 1e12


@pytest.mark.parametrize("name", ALL)
def test_figures_are_sourced_positive_and_plausible(name: str) -> None:
    device = device_zoo.device(name)
    figures = dict(device.figures())
    assert set(device.sources) == set(figures)
    assert all(source for source in device.sources.values())
    assert all(value > 0 for value in figures.values())
    assert device.price_per_hour is None
    assert device.chip
    assert device.architecture
    peak = device.peak_flops
    assert "fp32/vector" in peak or name == "rtx_pro_6000_server"
    fp32 = peak.get("fp32/vector")
    if fp32 is not None:
        assert 1e12 < fp32 < 200e12
        for kind in ("bf16/matrix", "fp16/matrix", "int8/matrix"):
            assert peak.get(kind, fp32) >= fp32
        if device.clock_hz is not None and device.units is not None and device.kind == "cuda":
            lanes = fp32 / (2 * device.units * device.clock_hz)
            assert lanes == pytest.approx(64, rel=0.1) or lanes == pytest.approx(128, rel=0.1)
    # A figure doubled by sparsity would stand out: an 8-bit type is at most twice as fast as a
    # 16-bit one (four times where that one accumulates in fp32 at half rate), tf32 half as fast.
    if "fp16/matrix" in peak:
        for eight in ("fp8/matrix", "int8/matrix"):
            assert peak.get(eight, 0) <= 4.01 * peak["fp16/matrix"]
        assert peak.get("tf32/matrix", 0) <= 0.51 * peak["fp16/matrix"]
        if "bf16/matrix" in peak and name != "mi100":  # whose bf16 runs at half the rate
            assert peak["bf16/matrix"] == peak["fp16/matrix"]
    if device.memory_bandwidth is not None:
        assert 100e9 < device.memory_bandwidth < 10e12
    if device.kind == "cpu":
        assert device.memory_bytes is None  # the host's, not the chip's
        assert device.isa
    else:
        assert device.memory_bytes is not None
        assert 7 * 2**30 < device.memory_bytes < 300 * 2**30
        assert device.host_link_bandwidth is None or device.host_link_bandwidth > 10e9


@pytest.mark.parametrize(
    ("name", "figure", "value"),
    [
        ("t4", "peak_flops.fp16/matrix", 65 * T),
        ("t4", "memory_bandwidth", 320e9),
        ("v100_sxm2_16gb", "peak_flops.fp16/matrix", 125 * T),
        ("a100_sxm_80gb", "peak_flops.bf16/matrix", 312 * T),
        ("a100_sxm_80gb", "peak_flops.tf32/matrix", 156 * T),
        ("a100_pcie_40gb", "memory_bandwidth", 1555e9),
        ("h100_sxm", "peak_flops.bf16/matrix", 989.4 * T),
        ("h100_sxm", "memory_bandwidth", 3.35e12),
        ("h100_pcie", "peak_flops.bf16/matrix", 756.5 * T),
        ("l4", "peak_flops.fp16/matrix", 121 * T),
        ("l4", "units", 58),
        ("rtx_4090", "peak_flops.fp16/matrix", 165.2 * T),
        ("mi250_gcd", "memory_bytes", 64 * 2**30),
        ("mi300x", "peak_flops.bf16/matrix", 1307.4 * T),
        ("epyc_7742", "peak_flops.fp32/vector", 4.608 * T),
        ("xeon_8480+", "peak_flops.bf16/matrix", 114.688 * T),
    ],
)
def test_public_values(name: str, figure: str, value: float) -> None:
    assert dict(device_zoo.device(name).figures())[figure] == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("name", ["p4", "p100_pcie_16gb", "p100_pcie_12gb", "p100_sxm2_16gb"])
def test_pascal_has_no_matrix_units(name: str) -> None:
    assert not [peak for peak in device_zoo.device(name).peak_flops if peak.endswith("/matrix")]


@pytest.mark.parametrize("name", [n for n in ALL if n.startswith(("v100", "t4", "rtx_2080"))])
def test_volta_and_turing_have_no_bf16(name: str) -> None:
    device = device_zoo.device(name)
    assert device.peak("bf16") is None
    assert device.peak("tf32") is None


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("h100-sxm", "h100_sxm"),
        ("gb200_sxm", "gb200"),
        ("H100_SXM", "h100_sxm"),
        ("a100-80g", "a100_sxm_80gb"),
        ("A100_SXM", "a100_sxm_80gb"),
        ("NVIDIA_A100-PCIE-40GB", "a100_pcie_40gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx_4090"),
        ("Intel(R) Xeon(R) Platinum 8380 CPU @ 2.30GHz", "xeon_8380"),
        ("AMD EPYC 7742 64-Core Processor", "epyc_7742"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_aliases(alias: str, name: str) -> None:
    assert device_zoo.canonical(alias) == name
    assert device_zoo.is_known(alias)
    assert device_zoo.device(alias) is device_zoo.device(name)


def test_unknown_and_ambiguous_names() -> None:
    with pytest.raises(SpecError, match=r"c.yaml: name: got 'rtx 4080'.*did you mean 'rtx_4090'"):
        device_zoo.device("rtx 4080", "c.yaml: name")
    with pytest.raises(SpecError, match=r"say which: v100_pcie_16gb, v100_pcie_32gb"):
        device_zoo.device("V100")
    with pytest.raises(SpecError, match="foreplan devices"):
        device_zoo.device("")


def test_a_device_that_another_begins_like_is_not_said_to_be_it() -> None:
    with pytest.raises(SpecError, match=r"did you mean 'h200'\?"):
        device_zoo.canonical("NVIDIA H20")


def _public(name: str) -> dict[str, Any]:
    folder = os.environ.get("FOREPLAN_DATA")
    if folder is None:
        pytest.skip("FOREPLAN_DATA names no folder of public data")
    document: dict[str, Any] = json.loads(Path(folder, name).read_text())
    return document


def test_agrees_with_the_table_of_aiconfigurator() -> None:
    for name, system in _public("aiconfigurator_systems.json").items():
        device, table = device_zoo.device(name), system["gpu"]
        assert device.memory_bandwidth == table["mem_bw"], name
        assert device.tdp_w == table["power"], name
        assert device.peak("bf16") == pytest.approx(table["bfloat16_tc_flops"], rel=1e-3), name
        assert device.peak("int8") == pytest.approx(table["int8_tc_flops"], rel=1e-3), name
        assert device.launch_overhead_s == table["mem_empirical_constant_latency"], name
        # Not equal for the H200 alone, whose zoo figure is what nvidia-smi prints.
        assert device.memory_bytes == pytest.approx(table["mem_capacity"], rel=0.005), name


def test_agrees_with_the_table_of_neusight_but_for_its_slips() -> None:
    for name, table in _public("neusight_devices.json").items():
        device = device_zoo.device(name)
        gpus = 2 if name.endswith("_TP") else 1
        assert device.memory_bytes == gpus**-1 * table["Dev_Mem"] * 2**30, name
        assert device.memory_bandwidth == pytest.approx(table["Mem_Bw"] * 1e9 / gpus, rel=0.03), (
            name
        )
        if "SingleFLOPs" in table and gpus == 1:
            expected = table["SingleFLOPs"] * 1e9
            assert device.peak_flops["fp32/vector"] == pytest.approx(expected, rel=0.04), name
        if name not in ("Tesla_P4", "NVIDIA_L4"):  # counts half SMs; counts the full chip
            assert device.units == table["Num_Sm"], name
