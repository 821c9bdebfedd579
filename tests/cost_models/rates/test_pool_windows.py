"""What the windows of a pool cost on processors, and that nothing else pays for them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.program_table import program_table
from foreplan.cost_models.rates.known_rates import KnownRates
from foreplan.cost_models.rates.pool_windows import window_s
from foreplan.cost_models.roofline import RooflineSource
from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import Program, Variant, program

MAX = Variant("fp32", "fp32", "torch.max_pool2d")
CORE = Device(
    name="cpu:threads=1", chip="new", vendor="test", kind="cpu", isa=("avx2",),
    peak_flops={"fp32/vector": 1e11}, memory_bandwidth=2e10, launch_overhead_s=1.2e-6,
)  # fmt: skip


def pool(taps: int, variant: Variant = MAX) -> Program:
    return program("pool", variant, rows=16384, cols=4, taps=taps)


def test_a_maximum_costs_its_windows_and_not_only_its_bytes() -> None:
    # 16,384 windows of 9 at 1.2 us / 400 each; timed on a Zen 4: 2.1-3.6 ns an element.
    assert window_s(pool(9), CORE, 1.2e-6) == pytest.approx(16384 * 9 * 3e-9)
    assert window_s(pool(4), CORE, 1.2e-6) == pytest.approx(window_s(pool(9), CORE, 1.2e-6) * 4 / 9)
    known = KnownRates.load()
    none = pool(9, Variant("fp32", "fp32", "torch.max_pool2d_channels_last"))
    windowed, plain = known.seconds([pool(9), none], CORE)
    last = window_s(none, CORE, 1.2e-6)  # a result at a time
    assert last == pytest.approx(16384 * 1.2e-6 / 1300)
    assert windowed - plain == pytest.approx(16384 * 9 * 3e-9 - last)
    assert windowed > 10 * plain
    source = RooflineSource(CORE)
    prices = [source.estimate(item, CORE.name) for item in (pool(9), none)]
    assert prices[0] is not None
    assert prices[1] is not None
    assert prices[0].mean_s - prices[1].mean_s == pytest.approx(16384 * 9 * 3e-9 - last)


@pytest.mark.parametrize(("kernel", "calls"), [
    ("max_pool1d", 9 / 4000), ("avg_pool1d", 1 / 210), ("max_pool3d", 1 / 83 + 9 / 670),
    ("avg_pool3d", 1 / 285 + 9 / 2850),
])  # fmt: skip
def test_lines_and_volumes_cost_their_results_too(kernel: str, calls: float) -> None:
    item = pool(9, Variant("fp32", "fp32", f"torch.{kernel}"))
    assert window_s(item, CORE, 1e-6) == pytest.approx(1e-6 * 16384 * calls)


def test_cores_share_windows_and_gpus_have_none() -> None:
    many = CORE.model_copy(update={"units": 16})
    assert window_s(pool(9), many, 1.2e-6) == pytest.approx(window_s(pool(9), CORE, 1.2e-6) / 16)
    gpu = device_zoo.device("h200")
    assert window_s(pool(9), gpu, 1.2e-6) == 0
    library = "torch_graph-2.11-cuda"
    whole = program("pool", Variant("fp32", "fp32", "torch.adaptive_avg_pool2d"), rows=64, cols=49,
                    taps=49)  # fmt: skip
    asked = {(kind, "fp32"): library for kind in ("reduction", "pool")}
    table = program_table([pool(9), whole], gpu, asked)
    assert table.kind.tolist() == ["pool", "reduction"]
    assert table.dims["window"].tolist() == [3, 0]


@pytest.mark.parametrize("last", [False, True])
def test_a_captured_pool_says_its_window_and_its_layout(last: bool) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            pooled: Tensor = nn.functional.max_pool2d(x + 1, 3, 2, 1)
            return pooled

    layout = torch.channels_last if last else torch.contiguous_format
    images = torch.zeros(2, 8, 16, 16).to(memory_format=layout)
    steps = lower(capture(Net(), [images]))
    found = next(step.work for step in steps if step.kind == "pool")
    kernel = "torch.max_pool2d" + "_channels_last" * last
    assert found == program("pool", Variant("fp32", "fp32", kernel), rows=1024, cols=4, taps=9)
