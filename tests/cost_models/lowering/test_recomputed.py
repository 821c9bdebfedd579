"""What activation checkpoints compute again, against what torch runs in a backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.datasets.graphs.capture import capture

#: Names that only a forward pass runs, and what steps call them.
FORWARD_ALONE = {
    "addmm": "linear", "native_layer_norm": "layer_norm", "gelu": "gelu", "relu": "relu",
    "_softmax": "softmax", "sigmoid": "sigmoid", "silu": "silu",
}  # fmt: skip


class Seen(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition("::")[2].rstrip("_")
        self.names[FORWARD_ALONE.get(name, "")] += 1
        return func(*args, **(kwargs or {}))


class Layer(nn.Module):
    """A norm, an MLP and what comes behind it."""

    def __init__(self, end: str) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        ends: dict[str, Callable[[], Tensor]] = {
            "sum": lambda: x + y, "relu": lambda: torch.relu(y), "product": lambda: y,
            "softmax": lambda: x + F.softmax(y, -1), "silu": lambda: F.silu(y),
        }  # fmt: skip
        return ends[self.end]()


class Network(nn.Module):
    def __init__(self, end: str, use_reentrant: bool, *, nested: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(Layer(end) for _ in range(3))
        self.use_reentrant, self.nested = use_reentrant, nested

    def _layers(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        if self.nested:
            x = checkpoint(self._layers, x, use_reentrant=self.use_reentrant)
        else:
            x = self._layers(x)
        return self.last(x)


def run_again(network: nn.Module, x: Tensor) -> Counter[str]:
    loss = network(x).sum()
    with Seen() as seen:
        loss.backward()
    return Counter({name: count for name, count in seen.names.items() if name})


def priced_again(network: nn.Module, x: Tensor) -> Counter[str]:
    names = FORWARD_ALONE.values()
    steps = lower(capture(network, [x], eager=True, training=True), "training")
    back = (s.target.rpartition(".")[2] for s in steps if s.part == "backward" and s.host)
    return Counter(name for name in back if name in names)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("end", ["sum", "relu", "product", "softmax", "silu"])
def test_as_much_is_computed_again_as_torch_computes(end: str, use_reentrant: bool) -> None:
    network, x = Network(end, use_reentrant), torch.randn(5, 4)
    found = priced_again(network, x)
    assert found == run_again(network, x)
    assert found["linear"] == (6 if use_reentrant or end not in ("sum", "product") else 3)


def test_a_checkpoint_inside_another_runs_its_layers_a_third_time() -> None:
    network, x = Network("softmax", False, nested=True), torch.randn(5, 4)
    assert priced_again(network, x) == run_again(network, x)
    assert priced_again(network, x)["gelu"] > 3


def test_frozen_layers_are_not_computed_again() -> None:
    network, x = Network("sum", False), torch.randn(5, 4)
    for part in (network.first, *network.layers):
        part.requires_grad_(False)
    assert priced_again(network, x) == run_again(network, x) == Counter()


def test_early_stopping_can_be_turned_off() -> None:
    network, x = Network("sum", False), torch.randn(5, 4)
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        assert priced_again(network, x) == run_again(network, x)
        assert priced_again(network, x)["linear"] == 6


def test_a_pass_without_gradients_computes_nothing_twice() -> None:
    graph = capture(Network("sum", False), [torch.randn(5, 4)], eager=True)
    assert not any(step.part == "backward" for step in lower(graph))
    assert not any(node.recomputations for node in graph.operators())
