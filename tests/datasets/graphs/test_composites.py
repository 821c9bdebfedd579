"""Composite operators become the calls that eager execution makes for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from foreplan.datasets.graphs._composites import aten_name
from foreplan.datasets.graphs.capture import capture
from foreplan.errors import SpecError


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Distances(nn.Module):
    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return torch.cdist(one, other)


class Dispatched(TorchDispatchMode):
    """Names of the calls that reach a device, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shared = [result.alias_info for result in func._schema.returns if result.alias_info]
        if all(info.is_write for info in shared):
            self.names[aten_name(func)] += 1
        return func(*args, **(kwargs or {}))


COMPOSITES: dict[str, Callable[[Tensor], Tensor]] = {
    "outer": lambda x: torch.outer(x[0], x[1]),
    "cosine similarity": lambda x: F.cosine_similarity(x, x.flip(0)),
    "pairwise distance": lambda x: F.pairwise_distance(x, x.flip(0)),
    "cross entropy": lambda x: F.cross_entropy(x, torch.zeros(6, dtype=torch.long)),
    "take along": lambda x: torch.take_along_dim(x, torch.zeros(6, 1, dtype=torch.long), 1),
    "a difference broadcast": lambda x: torch.sub(*torch.broadcast_tensors(x, x[0])),
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_parts_are_what_eager_execution_dispatches(name: str) -> None:
    module, x = Function(COMPOSITES[name]), torch.rand(6, 8)
    with Dispatched() as seen, torch.no_grad():
        module(x)
    operators = capture(module, [x], eager=True).operators()
    found = Counter(node.target.removeprefix("aten.") for node in operators if node.op != "input")
    assert found == seen.names
    assert all(node.op != "unknown" for node in operators)


def test_a_conversion_to_a_type_that_is_there_is_none() -> None:
    graph = capture(Function(lambda x: x.type_as(x) + 1.0), [torch.rand(6, 8)], eager=True)
    assert [node.target for node in graph.operators()] == ["input", "aten.add"]


def test_what_runs_as_a_whole_stays_whole() -> None:
    graph = capture(nn.LSTM(8, 4, batch_first=True), [torch.rand(2, 6, 8)], eager=True)
    assert [(node.op, node.target) for node in graph.operators()][-1] == ("recurrent", "aten.lstm")


def test_parts_of_distances_are_what_their_kernel_calls() -> None:
    module, one, other = Distances(), torch.rand(30, 8), torch.rand(40, 8)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as seen:
        module(one, other)
    ran = Counter(event.key.removeprefix("aten::").rstrip("_") for event in seen.events())
    operators = capture(module, [one, other], eager=True).operators()
    found = Counter(node.target.removeprefix("aten.") for node in operators if node.op != "input")
    assert found["mm"] == 1
    assert found == {name: ran[name] for name in found}


def test_a_composite_that_is_traced_as_itself_is_taken_apart_once() -> None:
    with pytest.raises(SpecError, match=r"sizes do not depend on values"):
        capture(Function(lambda x: x[x > 0.5] * 2.0), [torch.rand(6, 8)], eager=True)


def test_parts_belong_to_the_module_that_called_the_whole() -> None:
    class Alike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.CosineSimilarity()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.first(x), x)
            return out

    operators = capture(Alike(), [torch.rand(6, 8)], eager=True).operators()
    assert {node.module for node in operators if node.op != "input"} == {"first", "last"}
