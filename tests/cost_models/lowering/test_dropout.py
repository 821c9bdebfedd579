"""Dropout and batch norms of a training step: programs, gradients, prices; what lacks them."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch
from tests.cost_models.autograd_kernels import autograd, priced
from tests.cost_models.two_devices import CPU, GPU
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.lowering.graph_step import Step
from foreplan.cost_models.program_table import program_table
from foreplan.cost_models.replay import predict_latency
from foreplan.cost_models.roofline import RooflineSource
from foreplan.cost_models.sources.composed import ComposedSource
from foreplan.datasets import device_zoo
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.sweeps.map_functions import MAP_FUNCTIONS

ROWS, COLS = 40, 24
PROBABILITY = 0.25
FP32 = Variant("fp32", "fp32", "torch.dropout")
BACK = Variant("fp32", "fp32", "torch.dropout_backward")


def dropping() -> nn.Sequential:
    return nn.Sequential(nn.Linear(COLS, COLS), nn.Dropout(PROBABILITY), nn.ReLU())


class Recorder(TorchDispatchMode):
    """Lists calls that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        if name not in ("empty_like", "detach"):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def dropped(steps: list[Step]) -> list[tuple[str, Program]]:
    return [
        (step.part, step.work) for step in steps
        if isinstance(step.work, Program) and step.work.op == "dropout"
    ]  # fmt: skip


def test_dropout_and_its_gradient_are_programs_of_a_training_step() -> None:
    given = (torch.rand(ROWS, COLS),)
    trained = lower(capture(dropping(), given, eager=True, training=True), "training")
    sizes = {"rows": ROWS, "cols": COLS}
    assert dropped(trained) == [
        ("forward", program("dropout", FP32, **sizes)),
        ("backward", program("dropout", BACK, **sizes)),
    ]
    assert not dropped(lower(capture(dropping(), given, eager=True), "training"))


def test_bytes_by_hand() -> None:
    # fp32 is read and written, and a mask of a byte is written; the gradient reads it.
    assert program("dropout", FP32, rows=ROWS, cols=COLS).bytes == ROWS * COLS * (4 + 4 + 1)
    half = Variant("bf16", "bf16", "torch.dropout")
    assert program("dropout", half, rows=ROWS, cols=COLS).bytes == ROWS * COLS * (2 + 2 + 1)
    # A batch's own statistics are known when all of it has been read, which is then read again.
    sizes = {"rows": 32, "cols": 49, "channels": 16}
    kept, own = (
        program("batch_norm", Variant("fp32", "fp32", f"torch.batch_norm{words}"), **sizes).bytes
        for words in ("", "_of_batch")
    )
    assert (kept, own) == (2 * 4 * 32 * 49, 3 * 4 * 32 * 49)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (dropping(), (ROWS, COLS)),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout2d(0.5)), (2, 3, 9, 9)),
    ],
)
def test_gradients_are_what_autograd_runs(module: nn.Module, shape: tuple[int, ...]) -> None:
    given = torch.rand(*shape)
    steps = lower(capture(module, (given,), eager=True, training=True), "training")
    assert priced(steps) == autograd(module.train()(given))


def test_parts_on_a_processor_are_what_torch_runs() -> None:
    given = torch.rand(ROWS, COLS, requires_grad=True)
    with Recorder() as forward:
        result = nn.functional.dropout(given, PROBABILITY, training=True)
    assert forward.found == Counter(bernoulli=1, div=1, mul=1)
    gradient = torch.ones_like(result)
    with Recorder() as backward:
        torch.autograd.grad(result, given, gradient)
    assert backward.found == Counter(mul=1)
    roofline = RooflineSource(CPU)
    source = ComposedSource([roofline], CPU)
    sizes = {"rows": ROWS, "cols": COLS}

    def map_s(name: str, inputs: int) -> float:
        kernel = Variant("fp32", "fp32", f"torch.{name}")
        found = roofline.estimate(program("elementwise", kernel, inputs=inputs, **sizes), CPU.name)
        assert found is not None
        return found.mean_s

    back = source.estimate(program("dropout", BACK, **sizes), CPU.name)
    assert back is not None
    assert back.mean_s == pytest.approx(map_s("mul", 2))
    whole = source.estimate(program("dropout", FP32, **sizes), CPU.name)
    assert whole is not None
    assert CPU.launch_overhead_s is not None
    # A draw takes a 200th of a call for each element, beside the call.
    draws_s = CPU.launch_overhead_s * (1 + ROWS * COLS / 200)
    assert whole.mean_s == pytest.approx(map_s("div", 1) + map_s("mul", 2) + draws_s)


def test_a_gpu_has_a_kernel_of_its_own() -> None:
    items = [program("dropout", variant, rows=64, cols=512) for variant in (FP32, BACK)]
    source = ComposedSource([RooflineSource(GPU)], GPU)
    assert [source.estimate(item, GPU.name) for item in items] == [None, None]
    recorded = {("elementwise", "fp32"): "torch_graph-x"}
    table = program_table(items, device_zoo.device("h200"), recorded)
    assert table.kind.tolist() == ["elementwise"] * 2
    for name, values in (("rows", [64, 64]), ("cols", [512, 512]), ("inputs", [1, 1])):
        assert table.dims[name].tolist() == values
    timed = [MAP_FUNCTIONS[name] for name in ("native_dropout", "native_dropout_backward")]
    assert table.dims["function"].tolist() == timed


@pytest.mark.parametrize("last", [False, True])
def test_a_processor_collects_statistics_one_by_one(last: bool) -> None:
    roofline = RooflineSource(CPU)
    source = ComposedSource([roofline], CPU)
    words = "_channels_last" if last else ""
    sizes = {"rows": 64, "cols": 100, "channels": 16}
    kept, own = (
        program("batch_norm", Variant("fp32", "fp32", f"torch.batch_norm{words}{of}"), **sizes)
        for of in ("", "_of_batch")
    )
    assert source.estimate(kept, CPU.name) is None
    found = source.estimate(own, CPU.name)
    if last:
        assert found is None
        return
    plain = roofline.estimate(kept, CPU.name)
    assert found is not None
    assert plain is not None
    assert CPU.launch_overhead_s is not None
    # An element takes an 830th of a call.
    assert found.mean_s == pytest.approx(plain.mean_s + CPU.launch_overhead_s * 64 * 100 / 830)


class Choosing(nn.Module):
    """Leaves out its block at random, by a number that torch draws."""

    def __init__(self) -> None:
        super().__init__()
        self.block = dropping()

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and torch.rand(()) < 0.1 else self.block(x)


@pytest.mark.parametrize("phase", ["inference", "training"])
def test_what_training_mode_did_not_reach_is_said(phase: Any) -> None:
    module = nn.Sequential(Choosing(), nn.Dropout(0.1))
    found = predict_latency(module, CPU, inputs=(torch.rand(ROWS, COLS),), phase=phase,
                            costs="roofline")  # fmt: skip
    said = ["0"] if phase == "training" else []
    assert found.evaluated() == said
    assert json.loads(json.dumps(found.document()))["evaluated"] == said
    assert len(dropped(list(found.steps))) == (4 if phase == "training" else 0)


def test_a_step_takes_longer_where_it_drops() -> None:
    none, frozen = dropping(), dropping()
    none[1].p = 0.0
    frozen[1].eval()
    dropped_s, none_s, frozen_s = (
        predict_latency(module, CPU, inputs=(torch.rand(ROWS, COLS),), phase="training",
                        costs="roofline").latency_s
        for module in (dropping(), none, frozen)
    )  # fmt: skip
    assert dropped_s > none_s == pytest.approx(frozen_s)
