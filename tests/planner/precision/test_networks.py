"""A workload names a network; it can make nothing be imported that was not installed for this."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import foreplan
from foreplan.datasets.models.model import Model
from foreplan.errors import SpecError
from foreplan.planner.plan import Plan
from foreplan.planner.precision.execution.reference import single_process_training
from foreplan.planner.precision.execution.tasks import byte_lm
from foreplan.planner.precision.graph import TrainingGraph
from foreplan.planner.precision.networks import network_names, register_network
from foreplan.planner.precision.spec import PrecisionWorkload
from foreplan.planner.precision.task import TrainingTask, training_task
from foreplan.planner.verify.verify import verify

PACKAGE = '''"""A package with two networks, of which one is broken."""
from foreplan.planner.precision.execution.tasks import byte_lm as ours

number = 3


def small(model, workload, seed):
    return ours(model, workload, seed)
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that registers networks, installed for this test."""
    info = tmp_path / "strange_networks-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strange-networks\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(
        "[foreplan.networks]\nsmall = strange_networks:small\nnumber = strange_networks:number\n"
        "absent = strange_networks:absent\n"
    )
    (tmp_path / "strange_networks.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("strange_networks", None)


def task_of(name: str) -> TrainingTask:
    options = {"width": 16, "layers": 1, "heads": 2, "context": 8}
    work = PrecisionWorkload(batch=2, network=name, network_options=options)
    return training_task(None, work, 0)


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that anybody can import but that registers nothing."""
    (tmp_path / "trap_for_plans.py").write_text("def build(*given):\n    raise SystemExit(7)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "trap_for_plans"
    sys.modules.pop("trap_for_plans", None)


@pytest.mark.parametrize("text", ["os:system", "{}:build", "{}.build", "{}"])
def test_an_import_path_is_no_network(text: str, trap: str) -> None:
    with pytest.raises(SpecError, match=r"workload\.network.*one of model, byte_lm"):
        task_of(text.format(trap))
    assert trap not in sys.modules


@pytest.mark.parametrize("text", ["os:system", "{}:build"])
def test_verifying_a_strangers_plan_imports_nothing(text: str, trap: str, make_plan: Plan) -> None:
    harmful = {**make_plan.workload, "network": text.format(trap)}
    plan = make_plan.model_copy(update={"workload": harmful})
    with pytest.raises(SpecError, match=r"workload\.network"):
        verify(plan, rounds=1)
    assert trap not in sys.modules


@pytest.fixture
def make_plan() -> Plan:
    """A good plan for one zoo device."""
    from foreplan.planner.api import plan

    workload = {
        "batch": 2, "network": "digits_mlp", "network_options": {"width": 16},
        "indicator": "uniform", "steps": 1,
    }  # fmt: skip
    return plan("precision", None, "1xt4", workload, costs="roofline")


@pytest.mark.usefixtures("installed")
def test_an_installed_package_registers_networks() -> None:
    assert {"small", "number", "absent"} <= set(network_names())
    assert task_of("small").module() is not None
    with pytest.raises(SpecError, match="a builder of training tasks"):
        task_of("number")
    with pytest.raises(SpecError, match="strange_networks:absent"):
        task_of("absent")
    with pytest.raises(SpecError, match="did you mean small"):
        task_of("smal")


def test_a_script_registers_a_network() -> None:
    seen: list[tuple[str, ...]] = []

    def build(model: Model | None, workload: PrecisionWorkload, seed: int) -> TrainingTask:
        return byte_lm(model, workload, seed)

    with register_network("mine", build):
        assert "mine" in network_names()
        assert task_of("mine").module() is not None
        other = Thread(target=lambda: seen.append(network_names()))
        other.start()
        other.join()
    assert "mine" not in network_names()
    assert seen == [network_names()], "a registration belongs to who made it"
    for name in ("byte_lm", "os:system", ""):
        with pytest.raises(SpecError, match="a word of letters, digits and _ other than"):
            register_network(name, build)
    with pytest.raises(SpecError, match="network mine: got 'str', expected a builder of training"):
        register_network("mine", "build")


class Backbone(torch.nn.Module):
    """A frozen trunk with statistics of its own, and a head that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.Linear(32, 64).requires_grad_(requires_grad=False)
        self.norm = torch.nn.BatchNorm1d(64, affine=False)
        self.head = torch.nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.trunk(x)))
        return found


class BackboneTask:
    """Samples for a `Backbone` that ``change`` is done to."""

    name = "backbone"

    def __init__(self, change: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
        self.change = change

    def module(self) -> torch.nn.Module:
        return self.change(Backbone())

    def batch(self, step: int, rank: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        torch.manual_seed(100 * rank + step + 50)
        return (torch.randn(4, 32),), torch.randint(8, (4,))

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output, target)


def planned(task: TrainingTask) -> foreplan.Plan:
    with register_network("backbone", lambda model, workload, seed: task):
        return foreplan.plan(
            "precision", None, "1xt4", {"network": "backbone", "batch": 4}, costs="roofline"
        )


def test_frozen_parameters_and_buffers_are_held_and_not_trained() -> None:
    memory = planned(BackboneTask(lambda module: module)).predicted.ranks[0].memory_bytes
    trained, frozen, statistics = 64 * 8 + 8, 32 * 64 + 64, 4 * (64 + 64) + 8
    assert memory["weights"] == 4 * (trained + frozen) + statistics
    assert memory["gradients"] == memory["optimizer"] == 4 * trained


def test_weights_that_no_run_would_take_are_refused_before() -> None:
    with pytest.raises(SpecError, match=r"backbone: head.weight: got 'torch.bfloat16', expected"):
        planned(BackboneTask(lambda module: module.bfloat16()))
    with pytest.raises(SpecError, match=r"trunk.weight: got 'the meta device', expected a module"):
        planned(BackboneTask(lambda module: module.to("meta")))


class TwoHeads(torch.nn.Module):
    """A table that is tied to its head, an attention of torch's, two results by name."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(40, 16)
        self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        self.words, self.score = torch.nn.Linear(16, 40, bias=False), torch.nn.Linear(16, 1)
        self.words.weight = self.table.weight

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.table(ids)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return {"words": self.words(x), "score": self.score(x).squeeze(-1)}


class TwoHeadsTask:
    name = "two_heads"

    def module(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return TwoHeads()

    def batch(self, step: int, rank: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
        torch.manual_seed(1000 * rank + step)
        ids = torch.randint(0, 40, (4, 6))
        return (ids,), (ids.roll(-1, 1), ids / 40)

    def loss(self, output: dict[str, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
        assert output["words"].dtype is output["score"].dtype is torch.float32
        words = torch.nn.functional.cross_entropy(output["words"].flatten(0, 1), target[0].ravel())
        return words + (output["score"] - target[1]).square().mean()


def test_a_network_may_return_several_results() -> None:
    """Traced, judged, planned and trained; each result has a loss behind it in the step."""
    task = TwoHeadsTask()
    graph = TrainingGraph.of(task, 4)
    losses = [o for o in graph.operators if o.node.op == "loss"]
    assert [o.node.inputs[0][-1] for o in losses] == [40, 1]
    assert graph.operators[-1].node.name == "loss"
    fields = {"network": "two_heads", "batch": 4, "slack": 0.5}
    for indicator in ("gradient_variance", "hessian"):
        with register_network("two_heads", lambda model, workload, seed: task):
            made = foreplan.plan("precision", None, "2xt4", fields | {"indicator": indicator},
                                 costs="roofline")  # fmt: skip
    work = PrecisionWorkload(batch=4, network="two_heads")
    decision = foreplan.decision_of(made, foreplan.PrecisionDecision)
    low = {"table": "fp32/bf16/torch.embedding", "words": "fp32/bf16/torch.linear",
           "score": "fp32/bf16/torch.linear"}  # fmt: skip
    workers = tuple(each.model_copy(update={"operators": low}) for each in decision.workers)
    found = {
        mode: single_process_training(
            task, work, decision.model_copy(update={"workers": workers}), mode=mode, steps=2
        )
        for mode in ("fast", "reference")
    }
    for rank in range(2):
        near = pytest.approx(found["reference"][f"losses_{rank}"], rel=0.01)
        assert found["fast"][f"losses_{rank}"] == near


def test_inputs_by_name_are_refused_with_what_to_do() -> None:
    class ByName(TwoHeadsTask):
        def batch(self, step: int, rank: int) -> Any:
            (ids,), target = super().batch(step, rank)
            return {"ids": ids}, target

    with pytest.raises(SpecError, match=r"batch: got '\(dict, tuple\)', .*needs one around it"):
        TrainingGraph.of(ByName(), 4)


@pytest.mark.parametrize(
    ("made", "got"),
    [
        (lambda x: x.square(), r"a tensor of \[4, 40\]"),
        (lambda x: 1.0, "float"),
        (lambda x: torch.zeros(()), "one without a gradient"),
    ],
)
def test_a_loss_is_one_number_with_a_gradient(made: Any, got: str) -> None:
    class Lost(TwoHeadsTask):
        def module(self) -> torch.nn.Module:
            return torch.nn.Sequential(torch.nn.Linear(16, 40))

        def batch(self, step: int, rank: int) -> Any:
            return (torch.ones(4, 16),), None

        def loss(self, output: Any, target: Any) -> Any:
            return made(output)

    with (
        register_network("lost", lambda model, workload, seed: Lost()),
        pytest.raises(SpecError, match=f"loss of the network: got '{got}'"),
    ):
        foreplan.plan("precision", None, "1xt4", {"network": "lost", "batch": 4}, costs="roofline")


def test_what_is_no_module_or_computes_again_is_refused() -> None:
    class Again(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.head = torch.nn.Linear(16, 16), torch.nn.Linear(16, 40)

        def forward(self, x: Tensor) -> Tensor:
            kept = checkpoint(lambda y: torch.relu(self.part(y)), x, use_reentrant=False)
            made: Tensor = self.head(kept)
            return made

    class Odd(TwoHeadsTask):
        def __init__(self, module: Any) -> None:
            self._module = module

        def module(self) -> Any:
            return self._module()

        def batch(self, step: int, rank: int) -> Any:
            return (torch.ones(4, 16),), torch.arange(4)

        def loss(self, output: Any, target: Any) -> Any:
            return torch.nn.functional.cross_entropy(output, target)

    for module, got in ((Again, "activation checkpointing"), (lambda: 7, "int")):
        with (
            register_network("odd", lambda model, workload, seed, m=module: Odd(m)),
            pytest.raises(SpecError, match=f"got '{got}'"),
        ):
            foreplan.plan(
                "precision", None, "1xt4", {"network": "odd", "batch": 4}, costs="roofline"
            )
