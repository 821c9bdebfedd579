"""What the host of a GPU takes to issue an eager pass."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from foreplan.cost_models.lowering.graph_programs import lower, model_steps
from foreplan.cost_models.lowering.graph_step import PHASES, Phase, Step
from foreplan.cost_models.lowering.host_call import HostCall
from foreplan.cost_models.rates.gpu_host import (
    HIGH,
    LOW,
    SECONDS,
    HostAsked,
    gpu_host_s,
    host_asked,
)
from foreplan.cost_models.replay import predict_latency, replay_book, replay_steps
from foreplan.datasets import device_zoo
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.specs import load_document

GPU = device_zoo.device("h200")
MEASURED = Path(__file__).parents[3] / "datasets/measured/h200_eager.json.gz"


class Network(nn.Module):
    """A convolution, a norm, views and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = self.norm(self.conv(images)).relu()
        out: torch.Tensor = self.head(found.flatten(2).transpose(1, 2))
        return out


def steps_of(phase: Phase) -> list[Step]:
    graph = capture(Network(), [torch.zeros(2, 3, 8, 8)], eager=True, training=phase == "training")
    return list(lower(graph, phase))


def test_what_a_pass_asks_by_hand() -> None:
    found = host_asked(steps_of("inference"))
    # Convolution, norm, relu, linear; flatten and transpose are views.
    assert found == {"inference": HostAsked(calls=4, long=2, views=2, tensors=0)}
    found = host_asked(steps_of("training"))
    assert list(found) == ["forward", "backward", "optimizer"]
    assert found["optimizer"] == HostAsked(0, 0, 0, tensors=5)
    assert found["backward"].tensors == 5
    assert found["forward"].calls >= found["backward"].calls >= 4, "a loss comes behind them"


def test_seconds_of_a_part_by_hand() -> None:
    asked = HostAsked(calls=25, long=3, views=10, tensors=0)
    prices = SECONDS["inference"]
    once = prices.once_s / 2  # of 25 calls half
    by_hand = 25 * prices.call_s + 3 * prices.long_s + 10 * prices.view_s + once
    assert prices.of(asked) == pytest.approx(by_hand)
    assert prices.of(HostAsked(0, 0, 0, 0)) == 0.0


@pytest.mark.parametrize("phase", PHASES)
def test_all_of_a_pass_is_spread_over_its_steps(phase: Phase) -> None:
    steps = steps_of(phase)
    seconds = gpu_host_s(steps)
    parts = host_asked(steps)
    assert seconds.shape == (len(steps), 3)
    assert seconds[:, 0].sum() == pytest.approx(sum(SECONDS[p].of(a) for p, a in parts.items()))
    assert seconds[:, 1] == pytest.approx(LOW * seconds[:, 0])
    assert seconds[:, 2] == pytest.approx(HIGH * seconds[:, 0])
    assert seconds.min() > 0


def test_steps_without_their_calls_are_counted_and_calls_can_be_given() -> None:
    steps = steps_of("inference")
    bare = [Step(s.kind, s.target, s.part, s.work, s.calls) for s in steps]
    assert host_asked(bare)["inference"].calls == 4
    calls = [HostCall("batch_norm", 0, True, 0)] * 4
    assert host_asked(bare, calls)["inference"].long == 4


def test_layers_take_the_host_in_proportion() -> None:
    model = load_model("gpt2")
    found = []
    for layers in (6, 12, 24):
        steps = model_steps(model.model_copy(update={"layers": layers}), batch=1, tokens=16)
        found.append(float(gpu_host_s(steps)[:, 0].sum()))
    assert found[0] < found[1] < found[2]
    # Each layer adds the same; only what runs once comes to it.
    assert (found[2] - found[1]) / (found[1] - found[0]) == pytest.approx(2.0, rel=0.02)


def test_eager_passes_of_few_tokens_wait_for_the_host_and_graphs_do_not() -> None:
    eager = predict_latency("opt-125m", "h200", sequence_length=16)
    graph = predict_latency("opt-125m", "h200", sequence_length=16, execution="graph")
    assert eager.limit == "host"
    assert eager.latency_s > 4 * graph.latency_s
    assert eager.low_s < eager.latency_s < eager.high_s
    known = predict_latency("opt-125m", "h200", sequence_length=16, launch_s=1e-6)
    assert known.latency_s < eager.latency_s / 3, "who knows the host says so"


@pytest.mark.parametrize(("name", "shape"), [("opt", (1, 256)), ("vit", (1, 224))])
def test_networks_that_nothing_was_fitted_to(name: str, shape: tuple[int, int]) -> None:
    from foreplan.cost_models.passes.end_to_end_networks import build, example

    document = load_document(MEASURED)
    (row,) = [
        row for row in document["passes"]
        if (row["network"], row["size"], tuple(row["shape"]), row["phase"])
        == (name, "large", shape, "inference")
    ]  # fmt: skip
    with torch.device("meta"):
        network = build(name, "large")
    network = network.to(device="meta", dtype=torch.bfloat16).eval()
    inputs = example(name, "large", shape, "meta", torch.bfloat16)
    steps = lower(capture(network, inputs, name=name, eager=True))
    found = replay_steps(steps, replay_book(GPU), GPU)
    assert found.limit == "host"
    assert found.latency_s == pytest.approx(np.median(row["whole_s"]), rel=0.15)


def test_torchs_own_encoder_is_a_call_a_layer_and_what_that_calls() -> None:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    module = encoder.to(device="meta", dtype=torch.bfloat16)
    inputs = [torch.zeros(2, 64, 256, device="meta", dtype=torch.bfloat16)]
    steps = lower(capture(module, inputs, eager=True))
    # Two norms, four products, attention and two sums; the layer's own call launches nothing.
    assert host_asked(steps) == {"inference": HostAsked(calls=54, long=0, views=6, tensors=0)}
    found = replay_steps(steps, replay_book(GPU), GPU)
    (row,) = [
        row for row in load_document(MEASURED)["passes"] if row["network"] == "encoder of torch"
    ]  # fmt: skip
    assert found.limit == "host"
    assert found.latency_s == pytest.approx(np.median(row["whole_s"]), rel=0.25)
    assert found.low_s < min(row["whole_s"]) < found.high_s
    training = lower(capture(module, inputs, eager=True, training=True), "training")
    assert host_asked(training)["forward"].views > 100, "nothing is fused"
    with pytest.raises(ValueError, match="captured as inference"):
        lower(capture(module, inputs, eager=True), "training")


def test_the_document_says_what_was_measured() -> None:
    document = load_document(MEASURED)
    assert json.dumps(document)  # nothing but numbers and words
    assert document["board"] == "NVIDIA H200"
    sizes = {row["size"] for row in document["passes"]}
    assert sizes == {"plain", "large"}
