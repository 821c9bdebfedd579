"""What a processor takes between the operators of a pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from foreplan.cost_models.costs import CostBook, Estimate
from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.lowering.graph_step import PHASES, Part, Phase
from foreplan.cost_models.rates import processor_host
from foreplan.cost_models.rates.processor_host import brought_share, processor_host_s
from foreplan.cost_models.rates.reuse import working_set
from foreplan.cost_models.replay import replay, replay_book, replay_steps
from foreplan.datasets.device import Device
from foreplan.datasets.graphs.capture import capture

CORE = Device(
    name="cpu:threads=1", chip="new", vendor="test", kind="cpu", isa=("avx2",),
    peak_flops={"fp32/vector": 1e11}, memory_bandwidth=2e10, launch_overhead_s=2e-6,
)  # fmt: skip
CALL_S = float(CORE.launch_overhead_s or 0.0)
NETWORK = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
STEPS = {
    phase: lower(capture(NETWORK, [torch.zeros(4, 64)], eager=True), phase) for phase in PHASES
}


def priced(phase: Phase, source: str) -> list[float]:
    prices = [Estimate(1e-5, 1e-5, 1e-5, source) for _ in STEPS[phase]]
    return processor_host_s(STEPS[phase], prices, CORE)


def test_every_call_of_a_pass_has_its_price() -> None:
    calls = [step.calls for step in STEPS["inference"]]
    infer = priced("inference", "predicted")
    assert infer == pytest.approx([infer[0] * count / calls[0] for count in calls])
    train = dict(zip([step.part for step in STEPS["training"]], priced("training", "predicted"),
                     strict=True))  # fmt: skip
    # Autograd makes a node for each forward call; nothing of the way back is Python's.
    assert train["forward"] > infer[0] > 0
    assert train["forward"] > train["backward"] > 0
    update = STEPS["training"][-1]
    assert update.part == "optimizer"
    assert update.calls == 4, "two weights and two biases"


def test_prices_that_hold_the_host_get_no_second_one() -> None:
    for source in ("given", "measured", "interpolated", "extrapolated"):
        assert priced("inference", source) == [0.0] * len(STEPS["inference"])
    assert min(priced("inference", "roofline")) > 0


def test_what_a_kernel_calls_by_itself_is_one_call() -> None:
    form = nn.Bilinear(4, 5, 6)
    steps = lower(capture(form, [torch.zeros(2, 4), torch.zeros(2, 5)], eager=True))
    assert [step.calls > 6 for step in steps] == [True, False], "some for each output, and a bias"
    prices = [Estimate(1e-5, 1e-5, 1e-5, "predicted") for _ in steps]
    whole, added = processor_host_s(steps, prices, CORE)
    assert whole == pytest.approx(added / steps[1].calls)


def many(count: int, part: Part = "forward", kinds: int = 6, device: Device = CORE) -> float:
    """Seconds of the host of a part of so many calls."""
    step = replace(STEPS["inference"][0], part=part, calls=1)
    steps = [replace(step, target=f"aten.{at % kinds}") for at in range(count)]
    prices = [Estimate(1e-5, 1e-5, 1e-5, "predicted")] * count
    return sum(processor_host_s(steps, prices, device))


def test_most_of_it_comes_once_for_a_pass() -> None:
    assert many(1) < 8 * CALL_S, "code of few calls stays near"
    tens, hundreds, thousands = many(100), many(400), many(4000)
    assert 10 * many(10) > tens, "each costs less the more there are"
    each, _ = processor_host._INFERENCE
    own = each * CALL_S
    assert 300 * own < hundreds - tens < 2 * tens, "what is each call's own comes again and again"
    # Code is brought back once: what thousands of calls more add is their own.
    assert many(8000) - thousands == pytest.approx(4000 * own, rel=0.01)


@pytest.mark.parametrize("phase", PHASES)
def test_a_pass_takes_its_operators_and_its_host(phase: Phase) -> None:
    steps = STEPS[phase]
    found = replay_steps(steps, replay_book(CORE, steps=steps), CORE)
    host_s = sum(processor_host_s(steps, found.prices, CORE))
    assert found.host_s == pytest.approx(host_s)
    assert found.latency_s == pytest.approx(found.device_s + host_s)
    assert found.low_s < found.latency_s < found.high_s
    none = replay_steps(steps, replay_book(CORE, steps=steps), CORE, launch_s=0.0)
    assert none.latency_s == pytest.approx(found.device_s)
    given = CostBook((), given={step.work: 1e-5 for step in steps})
    assert replay(steps, given, CORE).latency_s == pytest.approx(1e-5 * len(steps))


def test_code_is_brought_back_where_a_pass_fills_the_caches() -> None:
    used = working_set(STEPS["inference"])
    shares = [
        brought_share(STEPS["inference"], CORE.model_copy(update={"l3_bytes": int(used * over)}))
        for over in (1, 2, 4, 8, 16)
    ]
    assert shares[:2] == [1.0, 1.0]
    assert 1.0 > shares[2] > shares[3] > shares[4] > 0.0
    assert brought_share(STEPS["inference"], CORE) == 1.0, "no cache is known"


def test_of_few_kinds_of_call_there_is_little_code() -> None:
    own = processor_host._INFERENCE[0] * CALL_S
    once = [many(60, kinds=kinds) - 60 * own for kinds in (1, 2, 3, 6, 12)]
    assert once == pytest.approx([once[3] * share for share in (1 / 6, 1 / 3, 1 / 2, 1, 1)])


#: Its near caches hold any pass of this file.
NEAR = CORE.model_copy(update={"l2_bytes": 1 << 24, "l3_bytes": 1 << 28})


def test_nothing_is_brought_where_near_caches_hold_the_pass() -> None:
    own = processor_host._INFERENCE[0] * CALL_S
    for count in (1, 20, 400):
        assert many(count, device=NEAR) == pytest.approx(count * own)
    prices = [Estimate(1e-5, 1e-5, 1e-5, "predicted") for _ in STEPS["training"]]
    near, far = (
        processor_host_s(STEPS["training"], prices, device) for device in (NEAR, CORE)
    )  # fmt: skip
    for step, found, before in zip(STEPS["training"], near, far, strict=True):
        own = processor_host._NEAR.get(step.part, processor_host._TRAINING[step.part][0])
        assert found == pytest.approx(step.calls * own * CALL_S)
        assert found < before
    used = working_set(STEPS["training"])
    hosts = [
        sum(processor_host_s(
            STEPS["training"], prices, NEAR.model_copy(update={"l2_bytes": int(used / over)})
        )) for over in (0.5, 0.9, 1.5, 3.0, 10.0)
    ]  # fmt: skip
    assert hosts[0] == hosts[1] < hosts[2] < hosts[3] < hosts[4]


@given(
    count=st.integers(1, 600), kinds=st.integers(1, 12), near=st.booleans(),
    l3_bytes=st.sampled_from((1 << 10, 1 << 14, 1 << 25)),
)  # fmt: skip
def test_twice_the_calls_take_no_more_than_twice_and_what_comes_once(
    count: int, kinds: int, near: bool, l3_bytes: int
) -> None:
    device = (NEAR if near else CORE).model_copy(update={"l3_bytes": l3_bytes})
    single, double = (many(calls, kinds=kinds, device=device) for calls in (count, 2 * count))
    assert 0.0 < single < double
    assert double <= 2.001 * single + 0.6 * processor_host._INFERENCE[1] * CALL_S
    if near:
        assert double == pytest.approx(2 * single)
