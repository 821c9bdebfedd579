"""Kernels that torch runs beside, or in place of, a convolution's product."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.cost_models.operators.convolution_kernels import (
    as_it_lies,
    beside_s,
    kernel_columns,
    own_depthwise,
)
from foreplan.cost_models.operators.operator_features import features
from foreplan.cost_models.operators.operator_work import operator_work
from foreplan.datasets.sweeps.operator_table import OperatorTable, operator_table, texts

_GRAPH = "torch_graph-2.11-cuda"
_SIZES = {"b": 8, "cin": 64, "cout": 64, "window": 3, "size": 56, "stride": 1, "padding": 1,
          "groups": 1, "channels_last": 0, "bias": 0, "line": 0}  # fmt: skip
_BYTES = 8 * 64 * 56**2 * 2


def _one(
    dtype: str = "bfloat16", kind: str = "conv", library: str = _GRAPH, **sizes: float
) -> OperatorTable:
    dims = {name: np.array([float(size)]) for name, size in (_SIZES | sizes).items()}
    return operator_table(
        op=texts([kind]), kind=texts([kind]), dtype=texts([dtype]), library=texts([library]),
        device=texts(["h200"]), dims=dims, latency_s=np.array([1e-3]),
    )  # fmt: skip


def _beside(table: OperatorTable, l2: float = 0.0) -> float:
    return float(beside_s(table, operator_work(table), np.array([l2]))[0])


def _depthwise(dtype: str, **sizes: float) -> bool:
    return bool(own_depthwise(_one(dtype, "conv", _GRAPH, groups=64, **sizes))[0])


def test_torch_computes_plain_filters_of_a_channel_itself() -> None:
    assert _depthwise("bfloat16")
    assert _depthwise("fp32")
    assert _depthwise("bfloat16", cout=128)
    assert not _depthwise("bfloat16", channels_last=1)
    assert not _depthwise("bfloat16", cin=128, cout=128)  # two channels a group
    assert not own_depthwise(_one())[0]


def test_cudnn_computes_fp16_of_the_sizes_that_torch_trusts_it_with() -> None:
    assert not _depthwise("float16")
    assert _depthwise("float16", window=7, padding=3)
    assert _depthwise("float16", size=6)
    assert _depthwise("float16", stride=2)  # 64 channels of eight images are too few
    assert not _depthwise("float16", stride=2, b=1)
    assert own_depthwise(_one("float16", cin=16, cout=16, groups=16))[0]
    assert not _depthwise("float16", window=7, line=1)
    assert _depthwise("float16", window=7, line=1, stride=2)


def test_plain_images_of_16_bits_are_copied_there_and_back() -> None:
    bandwidth = operator_work(_one()).bandwidth[0]
    filters = 64 * 64 * 9 * 2
    moved = 2 * (2 * _BYTES + filters) / bandwidth
    assert moved < _beside(_one()) < 1.3 * moved + 5e-6
    # What L2 keeps between two kernels is read from there.
    assert _beside(_one(), l2=1e9) < _beside(_one())
    assert _beside(_one("fp32")) == 0
    assert _beside(_one(groups=64)) == 0  # torch's own kernel takes them as they lie
    assert _beside(_one(library="torch-2.1-cuda")) == 0


def test_plain_filters_are_copied_beside_images_that_are_channels_last() -> None:
    last = _beside(_one(channels_last=1))
    assert 0 < last < _beside(_one()) / 4
    assert _beside(_one(channels_last=1, kind="conv_input_gradient")) == last
    assert _beside(_one(channels_last=1, kind="conv_weight_gradient")) == 0
    assert _beside(_one(channels_last=1, window=1, padding=0)) == 0
    assert _beside(_one(channels_last=1, groups=64)) == 0


def test_a_bias_is_a_pass_over_the_results() -> None:
    added = _beside(_one("fp32", bias=1))
    assert added == pytest.approx(1.2e-6 + 4 * _BYTES / 0.85 / operator_work(_one()).bandwidth[0])


def test_groups_of_equal_powers_of_two_are_told_apart() -> None:
    def told(dtype: str = "bfloat16", **sizes: float) -> list[float]:
        table = _one(dtype, "conv", _GRAPH, **sizes)
        columns = kernel_columns(table, operator_work(table), np.array([5e7]), np.array([1e-4]))
        return [float(columns[name][0]) for name in ("equal_groups", "power_groups")]

    assert told(groups=2) == [1, 1]
    assert told(groups=2, cin=48, cout=48) == [1, 0]
    assert told(groups=2, cout=128) == [0, 0]
    assert np.isnan(told(groups=1)).all()
    assert np.isnan(told("fp32", groups=2)).all()
    assert np.isnan(told(groups=64)).all()


def test_columns_say_nothing_of_libraries_whose_times_hold_a_launch() -> None:
    for library, known in ((_GRAPH, True), ("torch-2.1-cuda", False)):
        table = _one(library=library)
        columns = kernel_columns(table, operator_work(table), np.array([5e7]), np.array([1e-4]))
        assert np.isfinite(columns["own_depthwise"][0]) == known
        assert np.isfinite(columns["beside_share"][0]) == known
    # The structure holds them too.
    plain, last = (features(_one(channels_last=last), "conv") for last in (0, 1))
    assert plain.structural_s[0] > last.structural_s[0]
    assert plain.values[0, plain.names.index("beside_share")] > 0


def test_windows_of_one_pixel_are_products_of_round_images_as_they_lie() -> None:
    one = {"window": 1, "padding": 0}
    for size, forward, weight in ((56, True, True), (28, True, False), (14, False, False)):
        assert as_it_lies(_one(size=size, **one))[0] == forward
        assert as_it_lies(_one(kind="conv_input_gradient", size=size, **one))[0] == forward
        assert as_it_lies(_one(kind="conv_weight_gradient", size=size, **one))[0] == weight
        assert (_beside(_one(size=size, **one)) == 0) == forward
    for other in ({"window": 3, "padding": 1}, {"stride": 2}, {"padding": 1}, {"groups": 2},
                  {"channels_last": 1}):  # fmt: skip
        assert not as_it_lies(_one(**one | other))[0], other
    assert not as_it_lies(_one("fp32", **one))[0]
    column = features(_one(**one, size=28), "conv")
    assert column.values[0, column.names.index("align_pixels")] == 4.0  # 784 pixels
