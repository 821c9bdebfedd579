"""Capture in training mode: what it adds, what is left as it was, and what cannot be traced so."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.graphs.operator_graph import OperatorGraph
from foreplan.errors import SpecError


class Block(nn.Module):
    """A linear, a batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.first(x)))


class Skipping(nn.Module):
    """Leaves out blocks at random while it trains."""

    def __init__(self, draw: Callable[[], float | Tensor]) -> None:
        super().__init__()
        self.draw = draw
        self.blocks = nn.ModuleList([Block() for _ in range(8)])
        self.last = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training or self.draw() < 0.5:
                x = block(x)
        return self.last(x)


def names(graph: OperatorGraph) -> Counter[str]:
    return Counter(node.target.removesuffix("_") for node in graph.operators())


def norm_of_batch(graph: OperatorGraph) -> list[bool]:
    """Whether each batch norm takes the batch's own statistics, as the trace has it."""
    calls = [call for call in graph.calls if call.target.startswith("aten.batch_norm.")]
    return [json.loads(call.arguments)[0][5] for call in calls]


ROWS = torch.rand(4, 6)


def test_training_mode_adds_dropout_and_norms_by_the_batch() -> None:
    module = Block()
    plain, trained = (capture(module, (ROWS,), eager=True, training=t) for t in (False, True))
    assert "aten.dropout" not in names(plain)
    assert names(trained)["aten.dropout"] == 1
    assert norm_of_batch(plain) == [False]
    assert norm_of_batch(trained) == [True]
    assert trained.evaluated == plain.evaluated == ()


@pytest.mark.parametrize("drop", [nn.Dropout(0.2, inplace=True), nn.Dropout1d(0.2),
                                  nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2)])  # fmt: skip
def test_every_kind_of_dropout_is_there_in_training_mode_alone(drop: nn.Module) -> None:
    module = nn.Sequential(nn.Linear(6, 6), drop)
    given = torch.rand(2, 4, 6)
    plain, trained = (capture(module, (given,), eager=True, training=t) for t in (False, True))
    assert set(names(plain)) == {"input", "aten.linear"}
    found = names(trained)
    assert found["aten.dropout"] + found["aten.bernoulli"] == 1


def test_dropout_of_nothing_is_no_operator() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.0))
    assert set(names(capture(module, (ROWS,), eager=True, training=True))) == {
        "input", "aten.linear",
    }  # fmt: skip


def test_a_module_in_training_mode_keeps_what_is_frozen() -> None:
    module = nn.Sequential(Block(), Block())
    module[0].eval()
    graph = capture(module, (ROWS,), eager=True, training=True)
    assert names(graph)["aten.dropout"] == 1
    assert norm_of_batch(graph) == [False, True]
    assert graph.evaluated == ()


def test_a_module_in_evaluation_mode_is_put_into_training_mode() -> None:
    module = nn.Sequential(Block(), Block()).eval()
    graph = capture(module, (ROWS,), eager=True, training=True)
    assert names(graph)["aten.dropout"] == 2
    assert norm_of_batch(graph) == [True, True]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_modes_and_statistics_stay_as_they_were(training: bool, fails: bool) -> None:
    module = nn.Sequential(Block(), Block())
    module[1].eval()
    module[0].drop.eval()
    before = [part.training for part in module.modules()]
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    if fails:
        with pytest.raises(SpecError):
            capture(module, (torch.rand(4, 5),), eager=True, training=training)
    else:
        capture(module, (ROWS,), eager=True, training=training, observe=True)
    assert [part.training for part in module.modules()] == before
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_the_callers_random_numbers_are_left_alone() -> None:
    drawn, module = [], Skipping(random.random)
    for captured in (False, True):
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002
        torch.manual_seed(3)
        if captured:
            capture(module, (ROWS,), eager=True, training=True, observe=True)
        drawn.append((random.random(), np.random.rand(), float(torch.rand(()))))  # noqa: NPY002
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_what_a_module_skips_at_random_is_the_same_each_time(draw: Callable[[], float]) -> None:
    module = Skipping(draw)
    found = []
    for seed in range(3):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        found.append(names(capture(module, (ROWS,), eager=True, training=True)))
    assert found[0] == found[1] == found[2]
    assert 0 < found[0]["aten.linear"] < 8


def test_a_choice_by_torch_puts_the_part_that_chooses_into_evaluation_mode() -> None:
    module = nn.Sequential(Skipping(lambda: torch.rand(())), nn.Dropout(0.1))
    graph = capture(module, (ROWS,), eager=True, training=True)
    assert graph.evaluated == ("0",)
    found = names(graph)
    assert found["aten.linear"] == 8  # nothing is skipped
    assert found["aten.dropout"] == 8 + 2  # parts inside, and behind, train
    assert graph.evaluated_around("0.blocks.3.drop") == "0"
    assert graph.evaluated_around("1") is None
    assert graph.evaluated_around("01") is None


def test_a_module_that_chooses_itself_is_evaluated_as_a_whole() -> None:
    graph = capture(Skipping(lambda: torch.rand(())), (ROWS,), eager=True, training=True)
    assert graph.evaluated == ("",)
    assert "aten.dropout" not in names(graph)
    assert graph.evaluated_around("blocks.3.drop") == ""


def test_a_norm_of_one_value_is_evaluated() -> None:
    module = nn.Sequential(Block(), nn.Dropout(0.1))
    graph = capture(module, (ROWS[:1],), eager=True, training=True)
    assert graph.evaluated == ("0.norm",)
    assert names(graph)["aten.dropout"] == 2


def test_what_no_mode_traces_is_refused_by_its_place() -> None:
    class Choosing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.1, self.training) if x.sum() > 0 else x

    with pytest.raises(SpecError, match=r"Sequential: 1.*depends on values of tensors"):
        capture(nn.Sequential(nn.Linear(6, 6), Choosing()), (ROWS,), eager=True, training=True)
