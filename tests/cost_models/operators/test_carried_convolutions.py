"""Convolutions on chips without a sweep: bytes by bandwidth, the rest by clock, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.cost_models.lowering.test_graph_operators import ASKED, conv, recorded
from tests.cost_models.operator_rows import synthetic

from foreplan.cost_models.operators.carried_convolutions import carried
from foreplan.cost_models.operators.operator_features import features
from foreplan.cost_models.operators.operator_predictor import OperatorPredictor
from foreplan.cost_models.predictor import Predictor
from foreplan.cost_models.program_table import program_table, recorded_libraries
from foreplan.datasets import device_zoo
from foreplan.datasets.sweeps.operator_table import OperatorTable, operator_table, texts

GRAPH = "torch_graph-2.11-cuda"
#: 64 channels of 32 images of 56 x 56 pixels, 3 x 3, one filter a channel.
BYTES = 32 * 64 * 56 * 56 * 4 * 2 + 64 * 9 * 4


class Constant:
    """Trees that say the same of every row."""

    def __init__(self, correction: float) -> None:
        self.correction = correction

    def predict(self, values: np.ndarray) -> np.ndarray:
        return np.full(len(values), self.correction)


def depthwise(device: str) -> OperatorTable:
    sizes = {"b": 32, "cin": 64, "cout": 64, "window": 3, "size": 56, "stride": 1, "padding": 1,
             "groups": 64}  # fmt: skip
    return operator_table(
        op=texts(["conv"]), kind=texts(["conv"]), dtype=texts(["fp32"]), library=texts([GRAPH]),
        device=texts([device]), dims={k: np.array([float(v)]) for k, v in sizes.items()},
        latency_s=np.array([np.nan]),
    )  # fmt: skip


def seconds(device: str, correction: float, swept: str = "h200") -> float:
    table = depthwise(device)
    block = features(table, "conv")
    asked, known = device_zoo.device(device), device_zoo.device(swept)
    found = carried(table, block, asked, known, Constant(correction))
    return float((block.structural_s * np.exp(found))[0])


@pytest.mark.parametrize("correction", [-1.5, 0.0, 2.0])
def test_on_the_swept_chip_nothing_is_carried(correction: float) -> None:
    structural = features(depthwise("h200"), "conv").structural_s[0]
    assert seconds("h200", correction) == pytest.approx(structural * math.exp(correction))


def test_bytes_go_by_bandwidth_and_the_rest_by_clock() -> None:
    moved = {n: BYTES / device_zoo.device(n).memory_bandwidth / 0.85 for n in ("h200", "l4")}
    units = {n: device_zoo.device(n).units * device_zoo.device(n).clock_hz for n in moved}
    taken = seconds("h200", 2.0)
    beside = (taken - moved["h200"]) * units["h200"] / units["l4"]
    assert seconds("l4", 2.0) == pytest.approx(moved["l4"] + beside)
    # A board of a sixteenth of the bandwidth is not sixteen times as slow where clock decides.
    assert seconds("l4", 2.0) < 0.3 * taken * moved["l4"] / moved["h200"]
    # What caches save there they save here.
    saved = seconds("h200", -3.0) / moved["h200"]
    assert saved < 1
    assert seconds("l4", -3.0) == pytest.approx(saved * moved["l4"])


def test_what_no_published_table_has_is_asked_of_another_chips_sweep() -> None:
    model = OperatorPredictor(trees=20).fit(
        OperatorTable.concat([synthetic(("h100_sxm", "a100_sxm_80gb"), 60), recorded(count=4000)])
    )
    a100 = device_zoo.device("a100_sxm_80gb")
    asked = {**ASKED, "fp32": conv(dtype="fp32"), "fp32 depthwise": conv(groups=128, dtype="fp32")}
    anywhere = recorded_libraries(model)
    assert recorded_libraries(model, a100) == {}
    table = program_table([*asked.values()], a100, {}, anywhere)
    library = dict(zip(asked, table.library, strict=True))
    swept = {name for name, found in library.items() if found == GRAPH}
    assert swept == {
        "conv", "channels last", "input gradient", "weight gradient", "depthwise", "reduction",
        "embedding", "fp32 depthwise", "copy", "update",
    }  # fmt: skip
    found = dict(zip(asked, Predictor(model).supported([*asked.values()], a100), strict=True))
    bytes_s = {name: item.bytes / a100.memory_bandwidth for name, item in asked.items()}
    # The sweep's are 1.5 us and twice the roofline, depthwise ones ten times; clocks say less.
    for name, least, most in (("embedding", 1, 6), ("reduction", 1, 6), ("depthwise", 3, 14)):
        estimate = found[name]
        assert estimate is not None
        assert estimate.source == "predicted"
        assert least < estimate.mean_s / bytes_s[name] < most
        assert estimate.high_s > 1.9 * estimate.mean_s
