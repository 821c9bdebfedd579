"""Maps of the sweep whose operands do not lie as their result does."""

from __future__ import annotations

import itertools

import torch

from foreplan.datasets.sweeps.map_functions import MAP_FUNCTIONS
from foreplan.datasets.sweeps.operator_case import Operands
from foreplan.datasets.sweeps.operator_cases import graph_cases


def test_results_are_as_large_as_said_and_named() -> None:
    view = Operands("cpu", 2e8)
    drawn = list(itertools.islice(graph_cases(0, scale=0.002, names=("apart",)), 80))
    for case in drawn:
        (call,) = case.calls(view)
        made = call()
        assert made.numel() == case.dims["rows"] * case.dims["cols"], case
        assert torch.isfinite(made.float()).all()
        assert case.dims["function"] == MAP_FUNCTIONS[case.op]
    marks = {(case.op, case.dims["strided"], case.dims["inputs"]) for case in drawn}
    assert {("pad", 3, 2), ("cat_heads", 3, 1), ("add", 4, 2), ("mul", 3, 1)} <= marks


def test_functions_have_a_number_each() -> None:
    assert sorted(MAP_FUNCTIONS.values()) == list(range(1, len(MAP_FUNCTIONS) + 1))
