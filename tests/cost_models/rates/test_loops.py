"""Loops of small calls: found by what repeats, priced as what never leaves near caches."""

from __future__ import annotations

import copy
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.lowering.graph_step import PHASES, Step
from foreplan.cost_models.rates.loops import looped_steps
from foreplan.cost_models.rates.processor_host import processor_host_s
from foreplan.cost_models.rates.reuse import near_loops, pass_waits
from foreplan.cost_models.replay import replay_book, replay_steps
from foreplan.datasets.device import Device
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import Variant, program
from foreplan.datasets.specs import load_document, validate

MEASURED = Path(__file__).parents[3] / "datasets/measured"
CORE = validate(
    Device, load_document(MEASURED / "epyc_networks_again_small.json.gz")["figures"], "figures"
)
FP32 = Variant("fp32", "fp32", "torch.any")


def step(target: str, kind: str = "elementwise", cols: int = 64) -> Step:
    work = program("elementwise", FP32, rows=1, cols=cols, inputs=2)
    return Step(kind, f"aten.{target}", "forward", work)


def turns(targets: Sequence[str], count: int, **of: int) -> list[Step]:
    return [step(target, **of) for _ in range(count) for target in targets]  # type: ignore[arg-type]


def test_a_loop_is_found_between_what_comes_once() -> None:
    steps = [step("tanh"), *turns(["mul", "add", "exp"], 20), step("sum"), step("mul")]
    assert looped_steps(steps, 1 << 20).tolist() == [False, *[True] * 60, False, False]


@pytest.mark.parametrize(
    "steps",
    [
        turns(["mul", "add", "exp"], 7),  # too few turns
        turns(["mul", "add"], 9),  # and too few calls
        turns(["mul", "add"], 40, cols=1 << 20),  # 24 MiB a turn
        [step(name, "linear" if name == "mm" else "elementwise")
         for _ in range(40) for name in ("mm", "mul", "add")],
        [step(f"other{i}") for i in range(100)],
        [],
    ],
)  # fmt: skip
def test_layers_large_operands_and_a_few_repetitions_are_none(steps: list[Step]) -> None:
    assert not looped_steps(steps, 1 << 20).any()


class Recurrence(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x
        for _ in range(50):
            state = torch.exp(-state) * x + state * 0.5
        return state


class Stack(nn.Module):
    """Many alike modules with a weight each, behind one another."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(copy.deepcopy(part) for _ in range(40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = torch.relu(part(x))
        return x


@pytest.mark.parametrize(
    ("part", "shape"),
    [
        (nn.Conv2d(4, 4, 3, padding=1), (1, 4, 8, 8)),
        (nn.Linear(16, 16), (1, 16)),
        (nn.LayerNorm(16), (2, 16)),
        (nn.GroupNorm(2, 4), (1, 4, 8, 8)),
    ],
)
def test_modules_with_weights_are_no_loop(part: nn.Module, shape: tuple[int, ...]) -> None:
    for phase in PHASES:
        graph = capture(Stack(part), [torch.rand(shape)], eager=True, training=phase == "training")
        assert not looped_steps(lower(graph, phase), 1 << 20).any()


def lowered(module: nn.Module, width: int) -> list[Step]:
    return lower(capture(module, [torch.rand(1, width)], eager=True))


def test_calls_of_a_loop_cost_a_line_of_python_and_no_code() -> None:
    steps = lowered(Recurrence(), 256)
    assert near_loops(steps, CORE).mean() > 0.9
    waits = pass_waits(steps, CORE)
    assert waits.looped
    assert all(share < 0.2 for share in waits.looped.values())
    prices = replay_steps(steps, replay_book(CORE, steps=steps), CORE).prices
    launch_s = CORE.launch_overhead_s or 0.0
    for each, host_s in zip(steps, processor_host_s(steps, prices, CORE), strict=True):
        number = each.host is not None and each.host.kind == "mul scalar"
        assert host_s == pytest.approx(launch_s * (1.1 if number else 0.3) * each.calls)


def test_loops_that_were_measured_take_what_is_predicted() -> None:
    """`tests/benchmarks/looped_calls.py` has the others; its constants are of all of them."""

    class Gates(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = x
            for _ in range(150):
                gate = torch.sigmoid(x + state)
                state = gate * state + (1.0 - gate) * torch.tanh(state)
            return state

    rows = json.loads((MEASURED / "epyc_loops.json").read_text())
    (measured_s,) = (row["seconds"][0] for row in rows if (row["loop"], row["n"]) == ("gates", 150))
    steps = lower(capture(Gates(), [torch.rand(2, 1024)], eager=True))
    prices = replay_steps(steps, replay_book(CORE, steps=steps), CORE).prices
    host_s = sum(processor_host_s(steps, prices, CORE))
    assert sum(price.mean_s for price in prices) + host_s == pytest.approx(measured_s, rel=0.15)
    assert statistics.fmean(near_loops(steps, CORE)) > 0.9
