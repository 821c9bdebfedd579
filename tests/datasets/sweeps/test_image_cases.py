"""Norms of groups and interpolated images of the sweep."""

from __future__ import annotations

import itertools

import torch

from foreplan.datasets.sweeps.image_cases import INTERPOLATED
from foreplan.datasets.sweeps.operator_case import Operands
from foreplan.datasets.sweeps.operator_cases import graph_cases


def test_norms_of_groups_are_rows_of_a_norm() -> None:
    view, seen = Operands("cpu", 2e8), set()
    names = ("group_norm", "group_norm_gradient")
    for case in itertools.islice(graph_cases(0, scale=0.002, names=names), 40):
        made = case.calls(view)[0]()
        whole = made[0] if case.op.endswith("gradient") else made
        d = case.dims
        assert whole.numel() == d["rows"] * d["cols"]
        assert whole.shape[1] == d["channels"]
        assert torch.isfinite(whole.float()).all()
        seen.add((case.kind, d["channels_last"]))
    assert {kind for kind, _ in seen} == {"layernorm", "layernorm_gradient"}


def test_interpolated_images_are_pools_of_their_own() -> None:
    view = Operands("cpu", 2e8)
    names = ("interpolated", "interpolated_gradient")
    for case in itertools.islice(graph_cases(1, scale=0.002, names=names), 40):
        d = case.dims
        assert d["average"] == INTERPOLATED
        assert d["window"] in (2, 4)
        made = case.calls(view)[0]()
        if case.kind == "pool":
            assert made.numel() == d["rows"]
        else:
            assert made[0].numel() <= 2 * d["rows"] * d["cols"]
