"""A document of the end-to-end check whose networks are lowered again."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import pytest
import torch

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.passes.call_steps import call_steps
from foreplan.cost_models.passes.end_to_end_lowering import described, lowered_again
from foreplan.cost_models.passes.end_to_end_networks import build, example
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.graphs.operator_graph import OperatorGraph
from foreplan.errors import SpecError

SHAPES = {"resnet": (1, 32), "bert": (2, 4), "t5": (2, 4), "swin": (2, 32)}


@functools.cache
def graph_of(name: str, training: bool) -> OperatorGraph:
    module = build(name, "tiny").eval()
    inputs = example(name, "tiny", SHAPES[name], "cpu", torch.float32)
    return capture(module, inputs, eager=True, training=training)


def document(name: str, *, training_mode: bool = False) -> dict[str, Any]:
    cases = []
    for phase in ("inference", "training"):
        graph = graph_of(name, training_mode and phase == "training")
        single = call_steps(graph.calls, phase)
        cases.append({
            "network": name, "shape": list(SHAPES[name]), "phase": phase, "graph": {"real_s": 1.0},
            "steps": described(lower(graph, phase)),
            "alone": [[step.key.target, step.key.arguments] for step in single],
            "calls": [[place, step.part, step.view] for place, step in enumerate(single)],
        })  # fmt: skip
    said = {"training_mode": True} if training_mode else {}  # older documents do not say it
    return {"size": "tiny", "dtype": "fp32", "cases": cases, **said}


def worked(found: dict[str, Any]) -> list[Any]:
    return [[step[:4] for step in case["steps"]] for case in found["cases"]]


@pytest.mark.parametrize("training_mode", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_the_same_code_lowers_to_the_same_steps(name: str, training_mode: bool) -> None:
    before = document(name, training_mode=training_mode)
    drops = [any(step[1] == "aten.dropout" for step in case["steps"]) for case in before["cases"]]
    assert drops == [False, training_mode and name in ("bert", "t5")]
    again = lowered_again(before)
    # Views that copies were dropped with are no work: the host's calls may differ, nothing else.
    assert worked(again) == worked(before)


def test_images_lie_as_in_the_document() -> None:
    before = document("resnet")
    for case in before["cases"]:
        for step in case["steps"]:
            step[3][0] = step[3][0].replace("torch.conv2d", "torch.conv2d_channels_last")
            # One pixel lies either way, and is called plain.
            if step[0] == "norm" and json.loads(step[3][0])[1][1] > 1:
                kernel = "torch.batch_norm" if step[2] == "forward" else "torch.backward"
                step[3][0] = step[3][0].replace(kernel, f"{kernel}_channels_last")
        for call in case["alone"]:
            if call[0] == "aten.batch_norm.default":
                positional, named = json.loads(call[1])
                shape = positional[0]["$tensor"][0]
                positional[0]["$tensor"][1] = [
                    math.prod(shape[1:]), 1, shape[1] * shape[3], shape[1],
                ]  # fmt: skip
                call[1] = json.dumps([positional, named])
    again = lowered_again(before)
    kernels = [
        json.loads(step[3][0])[2] for case in again["cases"] for step in case["steps"]
        if step[0] == "convolution"
    ]  # fmt: skip
    assert kernels
    assert all("conv2d_channels_last" in kernel for kernel in kernels)
    assert again == before


def test_documents_of_something_else_are_refused() -> None:
    before = document("resnet")
    with pytest.raises(SpecError, match="no size"):
        lowered_again({"cases": []})
    with pytest.raises(SpecError, match="dtype: got 'fp99', expected one of"):
        lowered_again({**before, "dtype": "fp99"})
    with pytest.raises(SpecError, match="size: got 'huge', expected one of"):
        lowered_again({**before, "size": "huge"})
    for cases, told in ((5, "got 5, expected a list"), ([{"shape": [1, 2]}], "no network")):
        with pytest.raises(SpecError, match=told):
            lowered_again({**before, "cases": cases})
    strange = {**before["cases"][0], "network": "nonsense"}
    with pytest.raises(SpecError, match="got 'nonsense', expected one of"):
        lowered_again({**before, "cases": [strange]})
    short = {**before["cases"][0], "steps": before["cases"][0]["steps"][:1]}
    with pytest.raises(SpecError, match="fewer convolutions"):
        lowered_again({**before, "cases": [short]})
