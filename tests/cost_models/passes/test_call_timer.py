"""Calls as a network makes them: the layout that a capture keeps, and how they are timed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.cost_models.clocked_cuda import CYCLE_S, GRAPH_S, ClockedCuda, install
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.lowering.graph_step import Phase
from foreplan.cost_models.passes import call_operands, call_timer, call_times
from foreplan.cost_models.passes.call_operands import CallKey
from foreplan.cost_models.passes.call_steps import UPDATE, CallStep, call_steps
from foreplan.cost_models.passes.call_timer import CallTimer
from foreplan.cost_models.passes.call_times import CallSeconds, LostDeviceError, time_calls
from foreplan.cost_models.passes.end_to_end_networks import build, example
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.graphs.operator_call import TENSOR, OperatorCall
from foreplan.datasets.program import Program


class Layouts(nn.Module):
    """A convolution of channels last, a halved tensor, a broadcast factor, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, image: Tensor) -> Tensor:
        x = self.conv(image.contiguous(memory_format=torch.channels_last))
        x = x.mean((2, 3))
        x = F.linear(x, self.weight)
        x = x * x.sum(-1, keepdim=True)
        x = torch.cat((x[:, 4:], x[:, :4]), -1)
        return F.linear(x, self.weight)


@pytest.fixture(scope="module")
def calls() -> tuple[OperatorCall, ...]:
    return capture(Layouts(), [torch.rand(2, 4, 6, 6)], eager=True).calls


def named(calls: tuple[OperatorCall, ...], name: str) -> list[OperatorCall]:
    return [call for call in calls if call.target.split(".")[1] == name]


def test_a_call_keeps_the_layout_of_its_operands(calls: tuple[OperatorCall, ...]) -> None:
    (conv,) = named(calls, "conv2d")
    image = json.loads(conv.arguments)[0][0][TENSOR]
    assert image == [[2, 4, 6, 6], [144, 1, 24, 4], "float32"]
    assert conv.gradients == (False, True, True)
    assert conv.parameters == (False, True, True)
    assert all(call.written_bytes == 0 for call in named(calls, "slice"))


def test_programs_of_convolutions_tell_their_layout() -> None:
    graph = capture(Layouts(), [torch.rand(2, 4, 6, 6)], eager=True)
    kernels = [
        step.work.variant.kernel
        for step in lower(graph, "training")
        if isinstance(step.work, Program) and step.work.op == "conv"
    ]
    # The image has no gradient.
    last = "torch.conv2d_channels_last_bias"
    assert kernels == [last, f"{last}_weight_gradient"]
    plain = capture(nn.Conv2d(4, 8, 3, bias=False), [torch.rand(2, 4, 6, 6)], eager=True)
    (step,) = lower(plain)
    assert isinstance(step.work, Program)
    assert step.work.variant.kernel == "torch.conv2d"


def test_an_observed_layout_is_what_the_device_leaves() -> None:
    module = build("llama", "tiny").eval()
    inputs = example("llama", "tiny", (2, 4), "cpu", torch.float32)
    found = capture(module, inputs, eager=True, observe=True).calls
    attention = named(found, "scaled_dot_product_attention")[0]
    positional, options = json.loads(attention.arguments)
    heads = [torch.rand(4096).as_strided(*part[TENSOR][:2]) for part in positional[:3]]
    attend: Any = F.scaled_dot_product_attention
    left = attend(*heads, None, *positional[4:], **options)
    assert json.loads(attention.result)[TENSOR][1] == list(left.stride())


def test_a_step_goes_back_through_what_has_gradients(calls: tuple[OperatorCall, ...]) -> None:
    steps = call_steps(calls, "training", [[8, 8]])
    backward = [s.key.target.split(".")[1] for s in steps if s.part == "backward"]
    # The product has two readers of one operand, the result of the first linear; the slices share
    # what they halve; the weight is used twice.
    assert backward.count("add_") == 3
    assert backward.count("slice") == 2
    assert backward.count("linear") == 2
    assert backward[0] == "cross_entropy_loss"
    assert backward[-1] == "conv2d"
    assert steps[-1].key.target == UPDATE
    assert [s.part for s in call_steps(calls, "inference")] == ["forward"] * len(calls)


def test_what_was_used_long_ago_is_old(calls: tuple[OperatorCall, ...]) -> None:
    def ages(steps: list[CallStep], name: str) -> tuple[int, ...]:
        (step,) = (s for s in steps if s.key.target.split(".")[1] == name and s.part == "forward")
        return step.key.ages

    large = capture(Layouts(), [torch.rand(64, 4, 64, 64)], eager=True).calls
    image, weight, _ = ages(call_steps(large, "inference"), "conv2d")
    # The image was just made channels last; the weight was last read a pass ago.
    assert image == 0
    assert weight >= 1 << 20
    assert ages(call_steps(large, "training"), "conv2d")[1] >= 4 * weight


def test_code_is_as_old_as_the_last_call_of_its_kind() -> None:
    def found(phase: Phase, part: str) -> list[int]:
        steps = call_steps(many, phase, code=True)
        return [s.key.code_age for s in steps
                if s.part == part and s.key.target == "aten.relu.default"]  # fmt: skip

    module = nn.Sequential(nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.ReLU())
    many = capture(module, [torch.rand(512, 512)], eager=True).calls
    # Three tensors of a MiB pass through the linear, two through each other call; the first comes
    # behind the pass before, whose last was of its kind.
    assert found("inference", "forward") == [0, 4 << 20, 0]
    first, second, third = found("training", "forward")
    assert (second, third) == (4 << 20, 0)
    assert first == 16 << 20  # a step's gradients and update lie between
    assert all(step.key.code_age == 0 for step in call_steps(many, "training"))
    assert found("training", "backward")[1:] == [0]  # the first has no gradient


@pytest.mark.parametrize("mode", ["inference", "forward", "backward"])
def test_what_was_moved_since_passes_before_each_call(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []

    class Counted(call_timer._Displacement):
        def __init__(self, size_bytes: int) -> None:
            super().__init__(1 << 12)
            self.size = size_bytes

        def __call__(self) -> None:
            moved.append(self.size)

    monkeypatch.setattr(call_timer, "_Displacement", Counted)
    timer = CallTimer("cpu", seconds=1e-4)
    plain = key("aten.relu.default", [[16], [1], "float32"], gradients=(True,))
    for age, other in (
        (0, set()),
        (4 << 20, {3 << 20}),
        (1 << 40, {2 * timer._operands.cache_bytes - (1 << 20)}),
    ):
        moved.clear()
        timer.time(plain._replace(code_age=age), mode)
        assert set(moved) == {1 << 20} | other


def key(target: str, *tensors: list[Any], gradients: tuple[bool, ...], **more: Any) -> CallKey:
    arguments = json.dumps([[{TENSOR: tensor} for tensor in tensors], more])
    return CallKey(target, arguments, gradients, (False,) * len(tensors), (0,) * len(tensors), 0)


def test_operands_lie_as_the_call_says(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        seen.append((a, b))
        return a * b

    def operator(target: str) -> Any:
        assert target == "aten.mul.Tensor"
        return multiply

    monkeypatch.setattr(call_operands, "operator_of", operator)
    made = key("aten.mul.Tensor", [[3, 4], [1, 3], "float32"], [[3, 4], [1, 0], "float32"],
               gradients=(True, False))  # fmt: skip
    for mode in call_timer.MODES:
        seen.clear()
        device_s, host_s = CallTimer("cpu", seconds=0.0).time(made, mode)
        assert device_s == host_s >= 0.0
        a, b = seen[0]
        assert (a.shape, a.stride(), b.stride()) == ((3, 4), (1, 3), (1, 0))
        assert (a.requires_grad, b.requires_grad) == (mode != "inference", False)


def test_gradients_are_of_as_many_calls_as_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # What stands twice in one pass of autograd would be computed once: times would be too short.
    def flops(call: Callable[[], object], *_: object) -> tuple[float, float]:
        with FlopCounterMode(display=False) as counter:
            call()
        return float(counter.get_total_flops()), 0.0

    side = 192
    square = [[side, side], [side, 1], "float32"]
    timer = CallTimer("cpu", seconds=0.0)
    monkeypatch.setattr(timer, "_seconds", flops)
    made = key("aten.mm.default", square, square, gradients=(True, True))
    assert timer.time(made, "backward")[0] == 2 * 2 * side**3  # two products


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> tuple[CallTimer, ClockedCuda]:
    """A timer whose device only keeps a clock, with memory of the processor."""
    device = install(monkeypatch)
    timer = CallTimer("cpu", seconds=0.0)
    timer.kind = "cuda"
    return timer, device


def test_a_recorded_call_is_timed_without_its_launch(
    recording: tuple[CallTimer, ClockedCuda], monkeypatch: pytest.MonkeyPatch
) -> None:
    timer, device = recording
    used: list[tuple[int, bool]] = []

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        used.append((a.data_ptr(), device.recording is not None))
        device.sleep(2000)
        return a * b

    monkeypatch.setattr(call_operands, "operator_of", lambda _: multiply)
    made = key("aten.mul.Tensor", [[64], [1], "float32"], [[64], [1], "float32"],
               gradients=(False, False))  # fmt: skip
    aged = made._replace(ages=(4 * 512, 0))
    for mode in ("inference", "forward"):
        used.clear()
        assert timer.graph_time(aged, mode) == pytest.approx(2000 * CYCLE_S + GRAPH_S)
        recorded = [place for place, captured in used if captured]
        copies = len(set(recorded))
        assert copies == 4  # as old as so many calls
        assert len(recorded) % copies == 0


def test_gradients_are_recorded(
    recording: tuple[CallTimer, ClockedCuda], monkeypatch: pytest.MonkeyPatch
) -> None:
    timer, device = recording

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            device.sleep(10_000)
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            device.sleep(2000)
            return 2 * grads[0]

    monkeypatch.setattr(call_operands, "operator_of", lambda _: Twice.apply)
    made = key("aten.mul.Tensor", [[64], [1], "float32"], gradients=(True,))
    assert timer.graph_time(made, "backward") == pytest.approx(2000 * CYCLE_S + GRAPH_S)


def test_an_update_is_recorded(
    recording: tuple[CallTimer, ClockedCuda], monkeypatch: pytest.MonkeyPatch
) -> None:
    timer, device = recording

    class AdamW:
        def __init__(self, tensors: list[Tensor], **options: Any) -> None:
            assert options["capturable"]
            assert all(tensor.grad is not None for tensor in tensors)

        def step(self) -> None:
            device.sleep(2000)

    monkeypatch.setattr(torch.optim, "AdamW", AdamW)
    found = timer.graph_update([[4, 4], [4]], "float32")
    assert found == pytest.approx(2000 * CYCLE_S + GRAPH_S)


def test_what_cannot_be_recorded_is_timed_in_a_queue_and_says_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    square = [[4, 4], [4, 1], "float32"]
    made = key("aten.mm.default", square, square, gradients=(False, False))
    view = key("aten.view.default", square, gradients=(False,))
    steps = [CallStep(made, "inference", "forward"), CallStep(view, "inference", "forward", True)]
    found = time_calls(steps, "cpu", 0.0, ["graph"])
    times = found[made, "inference"]
    assert times is not None
    assert times.queued is not None
    assert times.recorded_s is None
    assert times.why == "RuntimeError: CPUs have no CUDA graphs"
    assert "aten.mm.default inference was not recorded" in capsys.readouterr().err
    assert found[view, "inference"] == CallSeconds(None, None, 0.0)  # no kernel


def test_a_call_that_lost_the_device_is_not_run_so_again(monkeypatch: pytest.MonkeyPatch) -> None:
    square = [[4, 4], [4, 1], "float32"]
    made = key("aten.mm.default", square, square, gradients=(False, False))
    step = CallStep(made, "inference", "forward")

    def illegal(*_: object) -> float:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(CallTimer, "graph_time", illegal)
    monkeypatch.setattr(torch.cuda, "synchronize", illegal)
    timer = CallTimer("cpu", seconds=0.0)
    timer.device = "cuda:0"
    with pytest.raises(LostDeviceError, match="illegal memory access") as caught:
        call_times._recorded(timer, (made, "inference"), {})
    assert caught.value.call == (made, "inference")
    lost: dict[Any, Any] = {caught.value.call: {caught.value.execution: str(caught.value)}}
    times = time_calls([step], "cpu", 0.0, ["graph"], lost)[made, "inference"]
    assert times is not None
    assert times.queued is not None
    assert "illegal memory access" in str(times.why)
    lost[made, "inference"]["eager"] = "again"
    assert time_calls([step], "cpu", 0.0, ["graph"], lost) == {(made, "inference"): None}


def test_a_call_that_does_not_run_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = key("aten.mm.default", [[2, 3], [3, 1], "float32"], [[2, 3], [3, 1], "float32"],
                gradients=(False, False))  # fmt: skip
    step = CallStep(wrong, "inference", "forward")
    assert time_calls([step], "cpu", 0.0) == {(wrong, "inference"): None}
    assert "aten.mm.default" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["llama", "bert", "convnext"])
def test_every_call_of_a_network_can_be_timed(name: str) -> None:
    module = build(name, "tiny").eval()
    extent = 32 if name == "convnext" else 1
    graph = capture(module, example(name, "tiny", (1, extent), "cpu", torch.float32), eager=True)
    steps = call_steps(graph.calls, "training", [[4, 4], [4]])
    assert None not in time_calls(steps, "cpu", 0.0).values()


def test_what_is_multiplied_has_values_of_either_sign() -> None:
    operands = call_operands.CallOperands("cpu")
    tensor = json.dumps([[{TENSOR: [[64, 64], [64, 1], "float32"]}] * 2, {}])
    for target, signed in (
        ("aten.linear.default", True), ("aten.mm.default", True), ("aten.bmm.default", True),
        ("aten.mul.Tensor", False), ("aten.add.Tensor", False), ("aten.cumprod.default", False),
    ):  # fmt: skip
        key = CallKey(target, tensor, (False, False), (False, False), (0, 0), 0)
        found = operands._tensor([[64, 64], [64, 1], "float32"], key)
        assert bool((found < 0).any()) == signed, target


def test_numbers_pick_any_row() -> None:
    """Numbers that are all alike would add all gradients up in one row."""
    operands = call_operands.CallOperands("cpu")
    x, i = {TENSOR: [[7, 5], [5, 1], "float32"]}, {TENSOR: [[99], [1], "int64"]}
    for target, given, rows in (
        ("aten.embedding.default", [x, i], 7), ("aten.index.Tensor", [x, [i]], 7),
        ("aten.index.Tensor", [x, [None, i]], 5), ("aten.index.Tensor", [x, [i, i]], 5),
        ("aten.index_select.default", [x, 1, i], 5), ("aten.gather.default", [x, -1, i], 5),
        ("aten.gather.default", [x, 0, i], 7), ("aten.add.Tensor", [x, i], 1),
    ):  # fmt: skip
        key = CallKey(target, json.dumps([given, {}]), (False,), (False,), (0,), 0)
        found = operands._tensor([[99], [1], "int64"], key)
        assert set(found.tolist()) == set(range(rows)), (target, given)
