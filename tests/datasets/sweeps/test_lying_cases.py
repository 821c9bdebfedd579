"""Maps of the sweep whose operands lie across, are of two types, or are shared by heads."""

from __future__ import annotations

import itertools

import pytest
import torch

from foreplan.datasets.sweeps.map_functions import MAP_FUNCTIONS
from foreplan.datasets.sweeps.operator_case import Case, Operands
from foreplan.datasets.sweeps.operator_cases import graph_cases


def _made(name: str, count: int = 60) -> list[tuple[Case, torch.Tensor]]:
    view = Operands("cpu", 2e8)
    found = []
    for case in itertools.islice(graph_cases(0, scale=0.002, names=(name,)), count):
        (call,) = case.calls(view)
        found.append((case, call()))
    return found


@pytest.mark.parametrize("name", ["crossed", "mixed", "shared"])
def test_results_are_as_large_as_said_and_named(name: str) -> None:
    for case, made in _made(name):
        assert made.numel() == case.dims["rows"] * case.dims["cols"], case
        assert made.dtype == {"fp32": torch.float32}.get(case.dtype, getattr(torch, case.dtype, 0))
        assert case.dims["function"] == MAP_FUNCTIONS[case.op]


def test_rows_say_what_is_converted() -> None:
    dims = [case.dims for case, _ in _made("mixed")]
    assert {(d["broadcast"], d["inputs"], d["converts"]) for d in dims} == {
        (1, 1, 1), (1, 1, 2), (2, 1, 1), (2, 1, 2), (3, 1, 1), (3, 1, 2), (0, 2, 2)
    }  # fmt: skip
    assert {case.dims["converts"] for case, _ in _made("shared")} == {0}


def test_neighbours_of_one_operand_are_none_of_the_other() -> None:
    for case, made in _made("crossed"):
        assert case.dims["strided"] == 5
        assert made.shape[-1] == case.dims["cols"]
    assert {made.stride(-1) > 1 for _, made in _made("crossed")} == {True, False}


def test_rows_are_put_in_order() -> None:
    for case, made in _made("ordered"):
        assert made.shape[0] == case.dims["rows"]
        assert case.op == "topk" or made.shape[1] == case.dims["cols"]
