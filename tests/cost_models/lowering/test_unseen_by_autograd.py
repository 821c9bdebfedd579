"""What a module computes without gradients has none in a training step, as in autograd's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.cost_models.autograd_kernels import autograd, priced
from torch import Tensor, nn

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.datasets.graphs.capture import capture
from foreplan.errors import SpecError

ROWS = torch.rand(2, 6, 8) + 0.1


class Two(nn.Module):
    """Two layers, the first of which is read in a way of its own."""

    def __init__(self, read: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.read, self.first, self.second = read, nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.read(self.first, x))
        return out


class Picking(nn.Module):
    """The largest of a layer's results, by its place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).argmax(-1)  # type: ignore[no-any-return]


def without(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return layer(x).relu() * 2.0  # type: ignore[no-any-return]


@torch.no_grad()
def decorated(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)  # type: ignore[no-any-return]


def switched(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(False):
        left, right = layer(x).chunk(2, -1)
        with torch.enable_grad():
            seen: Tensor = layer(x)
    return torch.cat((left, right), -1) + seen


def detached(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x).relu().detach()  # type: ignore[no-any-return]


def discarded(layer: nn.Module, x: Tensor) -> Tensor:
    (layer(x).mean(-1) > 0).sum()
    return x


def written(layer: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = layer(x)
    y[..., 0] = 0.0
    return y


def under_an_autocast_that_is_off(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return layer(x).relu()  # type: ignore[no-any-return]


WAYS = (without, decorated, switched, detached, discarded, under_an_autocast_that_is_off)


@pytest.mark.parametrize("read", WAYS, ids=lambda read: str(read.__name__))
def test_gradients_are_what_autograd_runs(read: Callable[[nn.Module, Tensor], Tensor]) -> None:
    module = Two(read)
    steps = lower(capture(module, [ROWS], eager=True, training=True), "training")
    assert priced(steps) == autograd(module(ROWS))


def test_only_what_has_a_gradient_is_updated() -> None:
    steps = lower(capture(Two(without), [ROWS], eager=True, training=True), "training")
    assert steps[-1].target == "adamw"
    assert steps[-1].calls == 2  # weight and bias of the second layer


def test_what_is_written_in_place_keeps_its_gradient() -> None:
    steps = lower(capture(Two(written), [ROWS], eager=True, training=True), "training")
    products = [step for step in steps if step.part == "backward" and step.target == "aten.linear"]
    assert len([step for step in products if step.kind == "linear"]) == 3


def test_results_without_a_gradient_cannot_be_trained() -> None:
    graph = capture(Picking(), [ROWS], eager=True, training=True)
    with pytest.raises(SpecError, match=r"Picking.*no parameter has a gradient"):
        lower(graph, "training")
    assert lower(graph)


def test_a_pass_is_the_same_with_and_without_gradients() -> None:
    trained, passed = (
        [step.target for step in lower(capture(Two(switched), [ROWS], eager=True, training=on))]
        for on in (True, False)
    )
    assert trained == passed


def test_complex_parameters_are_trained() -> None:
    module = nn.Linear(8, 4, dtype=torch.complex64)
    given = torch.rand(6, 8, dtype=torch.complex64)
    steps = lower(capture(module, [given], eager=True, training=True), "training")
    back = [step for step in steps if step.part == "backward"]
    assert any("weight_gradient" in str(step.work) for step in back)
    assert steps[-1].target == "adamw"
