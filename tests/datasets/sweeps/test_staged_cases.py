"""Operators of the sweep as stages of networks have them."""

from __future__ import annotations

import itertools

import pytest
import torch

from foreplan.datasets.sweeps.convolution_cases import STAGED
from foreplan.datasets.sweeps.map_functions import MAP_FUNCTIONS
from foreplan.datasets.sweeps.operator_case import Case, Operands
from foreplan.datasets.sweeps.operator_cases import graph_cases


def _cases(name: str, count: int = 40) -> list[Case]:
    return list(itertools.islice(graph_cases(0, scale=0.001, names=(name,)), count))


def test_gradients_of_softmaxes_are_maps_of_two() -> None:
    view = Operands("cpu", 2e8)
    for case in _cases("softmax_gradient"):
        (call,) = case.calls(view)
        assert call().shape == (case.dims["rows"], case.dims["cols"])
        assert case.dims["inputs"] == 2
        assert case.dims["function"] == MAP_FUNCTIONS[case.op]
    assert {case.op for case in _cases("softmax_gradient")} == {
        "softmax_backward", "log_softmax_backward"
    }  # fmt: skip


@pytest.mark.parametrize("name", ["feature_norm", "feature_norm_gradient"])
def test_norms_of_features_have_one_pixel_a_row(name: str) -> None:
    view = Operands("cpu", 2e8)
    for case in _cases(name):
        (call,) = case.calls(view)
        made = call()
        made = made if isinstance(made, torch.Tensor) else made[0]
        assert made.shape == (case.dims["rows"] // case.dims["channels"], case.dims["channels"])
        assert case.kind == name.replace("feature_norm", "batchnorm")
        assert case.dims["cols"] == case.dims["channels_last"] == 1


@pytest.mark.parametrize("kind", ["conv", "conv_input_gradient", "conv_weight_gradient"])
def test_convolutions_of_stages_run(kind: str) -> None:
    view, roles = Operands("cpu", 2e8), set()
    for case in _cases(STAGED + kind, 25):
        assert case.kind == kind
        (call,) = case.calls(view)
        call()
        roles.add((case.dims["window"] == 1, case.dims["groups"] > 1))
    assert roles == {(True, False), (False, True), (False, False)}
