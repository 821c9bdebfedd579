"""Recurrent layers are made of what torch runs for them, and their prices follow."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cost_models.two_devices import CPU, GPU
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.lowering.graph_step import Step
from foreplan.cost_models.lowering.recurrent_parts import (
    RecurrentParts,
    is_recurrent,
    recurrent_parts,
)
from foreplan.cost_models.replay import replay_book
from foreplan.datasets.device import Device
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import Program, Variant, program
from foreplan.errors import SpecError

Kernel = tuple[Any, ...]
_WIDE = frozenset(
    [
        "add_",
        "add",
        "sub",
        "mul",
        "mul_",
        "neg",
        "sigmoid_",
        "tanh_",
        "tanh",
        "relu",
        "cat",
        "stack",
        "tanh_backward",
        "sigmoid_backward",
        "threshold_backward",
    ]
)


class Recorder(TorchDispatchMode):
    """What runs, as kinds and sizes; views, zeros and transposed copies are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Kernel] = Counter()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        self.names[name] += 1
        if name in ("addmm", "mm"):
            self.found["product", 2 * result.numel() * args[-2].shape[-1]] += 1
        elif name == "sum":
            self.found["sum", result.numel(), args[0].numel()] += 1
        elif name in _WIDE:
            self.found[name, result.numel()] += 1
        return result


def priced(parts: RecurrentParts) -> Counter[Kernel]:
    found: Counter[Kernel] = Counter()
    for part, count in (*parts.once, *parts.steps):
        size = math.prod(part.sizes[:2])
        if part.op == "linear":
            found["product", int(part.flops)] += count
        elif part.op == "reduction":
            found["sum", part.dims["rows"], size] += count
        else:
            found[part.variant.kernel.removeprefix("torch."), size] += count
    return found


NATIVE: dict[str, Callable[[], nn.Module]] = {
    "gated": lambda: nn.GRU(8, 16),
    "two layers in both directions": lambda: nn.GRU(8, 16, 2, bidirectional=True),
    "plain": lambda: nn.RNN(8, 16),
    "rectified": lambda: nn.RNN(8, 16, nonlinearity="relu", bidirectional=True),
    "projected": lambda: nn.LSTM(8, 16, proj_size=4),
    "two projected layers": lambda: nn.LSTM(8, 16, 2, proj_size=4),
}


def lowered(module: nn.Module, given: Tensor) -> list[Step]:
    return lower(capture(module, [given], eager=True), "training")


def recurrent(steps: list[Step], part: str) -> Program:
    (found,) = [s.work for s in steps if s.kind == "recurrent" and s.part == part]
    assert isinstance(found, Program)
    return found


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_parts_on_a_processor_are_what_torch_runs(name: str, steps: int) -> None:
    module, given = NATIVE[name](), torch.rand(steps, 2, 8)
    low = lowered(module, given)
    with Recorder() as seen, torch.no_grad():
        module(given)
    assert priced(recurrent_parts(recurrent(low, "forward"), CPU)) == seen.found
    out = module(given)[0]
    with Recorder() as seen:
        out.backward(torch.rand_like(out))
    assert priced(recurrent_parts(recurrent(low, "backward"), CPU)) == seen.found


def test_a_gradient_by_the_inputs_is_computed_where_something_before_is_trained() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8, bias=False), nn.GRU(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.first(x))[0]
            return out

    module, given = Two(), torch.rand(5, 2, 8)
    found = priced(recurrent_parts(recurrent(lowered(module, given), "backward"), CPU))
    out = module(given)
    with Recorder() as seen:
        out.backward(torch.rand_like(out))
    seen.found["product", 2 * 10 * 8 * 8] -= 1  # of the linear
    assert found == +seen.found


def test_a_long_short_term_memory_is_one_call_for_each_layer_and_direction() -> None:
    module, given = nn.LSTM(8, 16, 2, bidirectional=True), torch.rand(5, 2, 8)
    with Recorder() as seen, torch.no_grad():
        module(given)
    assert seen.names["mkldnn_rnn_layer"] == 4
    whole = recurrent(lowered(module, given), "forward")
    parts = recurrent_parts(whole, CPU)
    assert parts.fused
    products = [(p, n) for p, n in (*parts.once, *parts.steps) if p.op == "linear"]
    # Of the inputs of both layers, and of the state at each of five steps, in both directions.
    assert [n for _, n in products] == [2, 2, 20]
    assert sum(p.flops * n for p, n in products) == whole.flops


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", [*NATIVE, "memory"])
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_products_have_the_layers_flop(name: str, device: Device) -> None:
    module = nn.LSTM(8, 16) if name == "memory" else NATIVE[name]()
    low = lowered(module, torch.rand(5, 2, 8))
    forward = recurrent(low, "forward")
    parts = recurrent_parts(forward, device)
    each = [p.flops * n for p, n in (*parts.once, *parts.steps) if p.op == "linear"]
    assert sum(each) == forward.flops
    weights = sum(p.numel() for p in module.parameters() if p.dim() == 2)
    assert forward.flops == 2 * 5 * 2 * weights


def test_gates_are_one_map_on_a_gpu() -> None:
    parts = recurrent_parts(recurrent(lowered(nn.GRU(8, 16), torch.rand(5, 2, 8)), "forward"), GPU)
    assert [(p.op, n) for p, n in parts.steps] == [("linear", 5), ("elementwise", 5)]


def size(**more: int) -> Program:
    usual = {"steps": 20, "rows": 4, "inputs": 64, "hidden": 64, "outputs": 64, "gates": 4,
             "layers": 1, "directions": 1}  # fmt: skip
    return program("recurrent", Variant("fp32", "fp32", "torch.lstm"), **{**usual, **more})


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
def test_both_directions_are_twice_one_and_the_joining(device: Device) -> None:
    one, both = (recurrent_parts(size(directions=d), device) for d in (1, 2))
    joined = [(p, n) for p, n in both.once if p.variant.kernel == "torch.cat"]
    assert len(joined) == 1
    assert both.steps == [(p, 2 * n) for p, n in one.steps]
    assert [*both.once][:-1] == [(p, 2 * n) for p, n in one.once]


@pytest.mark.parametrize("kernel", ["torch.lstm", "torch.gru"])
@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
def test_a_price_grows_linearly_in_steps(device: Device, kernel: str) -> None:
    book = replay_book(device, "roofline")
    gates = 4 if kernel == "torch.lstm" else 3
    prices = []
    for steps in (1000, 2000, 3000):
        item = program("recurrent", Variant("fp32", "fp32", kernel),
                       **{**size(steps=steps).dims, "gates": gates})  # fmt: skip
        prices.append(book.cost(item, device.name).mean_s)
    assert prices[2] - prices[1] == pytest.approx(prices[1] - prices[0], rel=1e-9)
    assert prices[2] > 2.5 * prices[0]


def test_more_of_anything_takes_longer() -> None:
    book = replay_book(CPU, "roofline")
    least = book.cost(size(), CPU.name).mean_s
    for more in ({"rows": 8}, {"inputs": 128}, {"layers": 2}, {"directions": 2}, {"steps": 21}):
        assert book.cost(size(**more), CPU.name).mean_s > least


def test_dimensions_are_read_off_the_call() -> None:
    def dims(module: nn.Module, *shape: int) -> dict[str, int]:
        return recurrent(lowered(module, torch.rand(shape)), "forward").dims

    plain = dims(nn.GRU(8, 16, 2), 5, 3, 8)
    assert plain == {"steps": 5, "rows": 3, "inputs": 8, "hidden": 16, "outputs": 16, "gates": 3,
                     "layers": 2, "directions": 1}  # fmt: skip
    assert dims(nn.GRU(8, 16, 2, batch_first=True), 3, 5, 8) == plain
    assert dims(nn.GRU(8, 16, 2), 5, 8) == plain | {"rows": 1}  # without a batch
    assert dims(nn.GRU(8, 16, 2, bias=False), 5, 3, 8) == plain
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        projected = dims(nn.LSTM(8, 16, proj_size=4), 5, 3, 8)
    assert (projected["hidden"], projected["outputs"]) == (16, 4)


def test_packed_sequences_are_refused_in_a_line() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(pack_padded_sequence(x, [5, 3]))[0].data
            return out

    with pytest.raises(SpecError, match=r"module layer: got 'packed sequences'"):
        capture(Packed(), [torch.rand(5, 2, 8)], eager=True)


def test_only_recurrent_layers_are_such() -> None:
    assert is_recurrent(size())
    linear = program("linear", Variant("fp32", "fp32", "torch.linear"), rows=1, n=1, k=1)
    assert not is_recurrent(linear)
