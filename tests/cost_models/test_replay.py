"""Replays: what a pass lowers to, how host and device share the time, and `foreplan predict`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import foreplan
from foreplan.cost_models.costs import CostBook, Estimate, HostLaunch, Segment, Work
from foreplan.cost_models.execution import GRAPH_GAP_S, gaps
from foreplan.cost_models.lowering.graph_programs import lower, model_steps, programs
from foreplan.cost_models.lowering.graph_step import PARTS, PHASES, Phase, Step
from foreplan.cost_models.lowering.step_store import stored_steps
from foreplan.cost_models.predict_command import predict_model
from foreplan.cost_models.replay import predict_latency, replay, replay_book, replay_steps
from foreplan.cost_models.roofline import instead_of_bf16
from foreplan.datasets import device_zoo, kept_documents
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.model import Model
from foreplan.datasets.program import Program, Variant, program
from foreplan.errors import InfeasibleError, MissingDataError, SpecError

GPU, CPU = device_zoo.device("h200"), device_zoo.device("xeon_8480+")
FP32 = Variant("fp32", "fp32", "torch.linear")


def small(name: str, layers: int = 2) -> Model:
    """A zoo model with few, narrow layers."""
    shape = {"layers": layers, "hidden": 64, "heads": 4, "head_dim": 16, "ffn": 96, "vocab": 128}
    found = load_model(name)
    kv = 4 if found.kv_heads == found.heads else 2
    return found.model_copy(update={**shape, "kv_heads": kv})


def flops(steps: list[Step], part: str) -> float:
    total = 0.0
    for step in steps:
        works = step.work.parts if isinstance(step.work, Segment) else ((step.work, 1),)
        if step.part == part:
            total += sum(work.flops * n for work, n in works if isinstance(work, Program))
    return total


def linears(count: int, calls: int = 1) -> list[Step]:
    work = program("linear", FP32, rows=8, n=8, k=8)
    return [Step("linear", "aten.linear", "forward", work, calls)] * count


# Lowering ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", ["llama-3.2-1b", "gpt2", "opt-125m", "qwen3-0.6b"])
def test_repeating_a_layer_is_capturing_all(name: str, phase: Phase) -> None:
    model = small(name, layers=4)
    training = phase == "training"
    whole = lower(capture(model, batch=2, tokens=8, eager=True, training=training), phase)
    assert model_steps(model, batch=2, tokens=8, phase=phase) == whole


def test_flop_of_a_decoder_by_hand() -> None:
    model, rows = small("llama-3.2-1b"), 2 * 8
    linear = 2 * rows * (model.layers * model.linear_parameters + model.vocab * model.hidden)
    steps = [s for s in model_steps(model, batch=2, tokens=8) if s.kind == "linear"]
    assert flops(steps, "forward") == linear
    pairs = 2 * model.heads * 8 * 9 / 2
    attention = [s for s in model_steps(model, batch=2, tokens=8) if s.kind == "attention"]
    assert flops(attention, "forward") == model.layers * 4 * pairs * model.head_dim


def test_a_backward_pass_has_two_products_a_linear() -> None:
    steps = model_steps(small("gpt2"), batch=2, tokens=8, phase="training")
    products = [s for s in steps if isinstance(s.work, Program) and s.work.op == "linear"]
    assert flops(products, "backward") == 2 * flops(products, "forward")
    assert sum(s.part == "optimizer" for s in steps) == 1


def test_the_update_moves_seven_tensors_of_all_parameters() -> None:
    model = small("llama-3.2-1b", layers=3)
    update = model_steps(model, batch=1, tokens=4, phase="training")[-1].work
    assert isinstance(update, Program)
    largest = model.vocab * model.hidden
    assert update.dims == {"parameters": model.parameters, "kernels": 1, "longest": largest}
    assert update.bytes == 7 * 2 * model.parameters


class Network(nn.Module):
    """A little of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        x = x.flatten(2).transpose(1, 2)
        x = torch.softmax(x @ x.transpose(1, 2), -1) @ x
        out: torch.Tensor = self.head(x.mean(1))
        return out


def test_any_module_is_lowered() -> None:
    steps = lower(capture(Network(), (torch.zeros(2, 4, 16, 16),), eager=True))
    kinds = [step.kind for step in steps]
    assert kinds == ["convolution", "norm", "activation", "matmul", "softmax", "matmul",
                     "reduction", "linear"]  # fmt: skip
    conv = steps[0].work
    assert isinstance(conv, Program)
    assert conv.flops == 2 * 2 * 64 * 8 * 2 * 9
    # flatten, two transposes: the host makes them before the first product.
    assert steps[3].calls == 4


class Odd(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvals(x).real + torch.linalg.inv(x)


def test_unknown_operators_are_kept_and_listed() -> None:
    with pytest.raises(SpecError, match="an operator whose work is known"):
        capture(Odd(), (torch.eye(8),))
    result = predict_latency(Odd(), "h200", inputs=(torch.eye(8),))
    named = {row["operator"] for row in result.unsupported()}
    assert any("eig" in name for name in named)
    assert all(price.mean_s > 0 for price in result.prices)


# Time -------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.floats(1e-6, 1e-3), st.floats(1e-6, 1e-3), st.integers(1, 4))
def test_host_and_device_are_two_queues(n: int, host: float, device: float, calls: int) -> None:
    steps = linears(n, calls)
    book = CostBook((), given={steps[0].work: device})
    got = replay(steps, book, GPU, launch_s=host)
    # The first launch and the last operator are never hidden; the slower queue sets the pace.
    expected = calls * host + (n - 1) * max(calls * host, device) + device
    assert got.latency_s == pytest.approx(expected)
    if calls * host != pytest.approx(device):
        assert got.limit == ("host" if calls * host > device else "device")
    serial = replay(steps, book, CPU, launch_s=host)
    assert serial.latency_s == pytest.approx(n * (calls * host + device))
    assert replay(steps, book, CPU).latency_s == pytest.approx(n * device)
    by_part = dict.fromkeys(PARTS, 0.0) | {"forward": host}
    assert replay(steps, book, GPU, launch_s=by_part).latency_s == got.latency_s  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.floats(0.0, 1e-4), st.floats(1e-6, 1e-3), st.integers(1, 4))
def test_a_graph_has_one_launch_and_gaps(n: int, gap: float, device: float, calls: int) -> None:
    steps = linears(n, calls)
    book = CostBook((_launch_of_5_us(),), given={steps[0].work: device})
    got = replay(steps, book, GPU, execution="graph", gap_s=gap)
    assert got.latency_s == pytest.approx(5e-6 + n * device + (n - 1) * gap)
    assert got.host_s == pytest.approx(5e-6)
    assert got.gap_s == pytest.approx((n - 1) * gap)
    assert got.limit == ("device" if n * device >= 5e-6 else "host")
    # No graph is slower than the same operators issued by a host that takes longer than gaps do.
    eager = replay(steps, book, GPU, launch_s=5e-6 + gap)
    assert got.latency_s - (n - 1) * gap <= eager.latency_s * (1 + 1e-9)
    by_step = replay(steps, book, GPU, execution="graph", gap_s=[gap] * n)
    assert by_step.latency_s == got.latency_s


class _launch_of_5_us:
    """Prices launches alone."""

    def estimate(self, work: Work, device: str) -> Estimate | None:
        return Estimate.exact(5e-6 * work.calls) if isinstance(work, HostLaunch) else None


def test_what_a_profile_measured_holds_the_gap() -> None:
    prices = [Estimate(1e-6, 1e-6, 1e-6, source) for source in ("measured", "predicted")]
    assert gaps(prices, None) == [0.0, GRAPH_GAP_S]
    assert gaps(prices, 3e-6) == [0.0, 3e-6]
    assert gaps(prices, [1.0, 2.0]) == [1.0, 2.0]


def test_a_cpu_has_no_graphs() -> None:
    with pytest.raises(SpecError, match="expected a GPU"):
        predict_latency(small("gpt2"), CPU, execution="graph")
    with pytest.raises(SpecError, match="predict_latency: execution: got 'grap'"):
        predict_latency(small("gpt2"), "t4", execution="grap")  # type: ignore[arg-type]


def test_a_copy_of_the_input_comes_first() -> None:
    steps = linears(1)
    book = replay_book(GPU, "roofline")
    without, with_copy = replay(steps, book, GPU), replay(steps, book, GPU, input_bytes=10**9)
    assert GPU.host_link_bandwidth is not None
    gain, bound = with_copy.latency_s - without.latency_s, 10**9 / GPU.host_link_bandwidth
    assert bound < gain < 3 * bound
    assert replay(steps, replay_book(CPU), CPU, input_bytes=10**9).latency_s < 1.0


def test_the_parts_of_a_replay_add_up() -> None:
    result = predict_latency(small("llama-3.2-1b"), "a100_sxm_80gb", phase="training")
    for name in ("kind", "part", "source"):
        assert sum(result.by(name).values()) == pytest.approx(result.device_s)  # type: ignore[arg-type]
    assert result.low_s < result.latency_s < result.high_s
    assert result.latency_s >= max(result.host_s, result.device_s)
    assert set(result.by("part")) == {"forward", "loss", "backward", "optimizer"}
    assert result.unsupported()
    roofline = sum(row["seconds"] for row in result.unsupported())
    assert roofline == pytest.approx(result.by("source")["roofline"])


def test_a_cpu_is_priced_by_the_rates_of_others() -> None:
    steps = model_steps(small("gpt2"), batch=1, tokens=8)
    result = replay_steps(steps, replay_book(CPU), CPU)
    assert set(result.by("source")) <= {"predicted", "roofline"}
    assert result.by("source")["predicted"] > 0.9 * result.device_s
    assert result.host_s > 0.0
    assert result.latency_s == pytest.approx(result.device_s + result.host_s)
    plain = replay_steps(steps, replay_book(CPU, "roofline"), CPU)
    assert set(plain.by("source")) == {"roofline"}


# Command ----------------------------------------------------------------------------------------


def test_steps_are_kept_on_disk(tmp_path: Path) -> None:
    model = small("llama-3.2-1b", layers=3)
    for phase in PHASES:
        steps, cached = stored_steps(model, batch=1, tokens=8, phase=phase, folder=tmp_path)
        again, second = stored_steps(model, batch=1, tokens=8, phase=phase, folder=tmp_path)
        assert (cached, second) == (False, True)
        assert again == steps
    _, other = stored_steps(model, batch=1, tokens=9, phase="inference", folder=tmp_path)
    assert not other
    for path in tmp_path.glob("*.json"):
        path.write_text('{"works": [["linear"]], "steps": []}')
    mended, cached = stored_steps(model, batch=1, tokens=8, phase="training", folder=tmp_path)
    assert not cached
    assert mended == steps


def test_steps_of_other_code_are_captured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, found = small("llama-3.2-1b"), []
    for code in ("of a version", "of another", "of a version"):
        monkeypatch.setattr(kept_documents, "_code", lambda code=code: code)
        found.append(stored_steps(model, batch=1, tokens=8, phase="inference", folder=tmp_path)[1])
    assert found == [False, False, True]
    assert len(list(tmp_path.glob("*.json"))) == 2


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREPLAN_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_ranking_of_the_zoo(folder: Path) -> None:
    result = predict_model("tiny-llama-random", ["all"], sequence_length=64)
    times = [row["latency_s"] for row in result["devices"]]
    assert times == sorted(times)
    named = {row["device"] for row in result["devices"]} | set(result["unpriced"])
    assert named == set(device_zoo.names())
    json.dumps(result, allow_nan=False)
    assert result["captured"] == "now"
    again = predict_model("tiny-llama-random", ["t4,h200"], sequence_length=64)
    assert again["captured"] == "cache"
    by_name = {row["device"]: row for row in again["devices"]}
    assert by_name["t4"] in result["devices"]


def test_weights_that_do_not_fit_are_marked(folder: Path) -> None:
    result = predict_model("tiny-llama-random", ["t4"], phase="training")
    assert result["devices"][0]["fits"] is True
    assert result["devices"][0]["by_part_s"]["optimizer"] > 0
    assert result["dtype"] == "fp32"
    # Logits of 2**20 tokens alone, 8192 numbers of 4 bytes each, are 32 GiB.
    asked = {"batch": 1 << 14, "sequence_length": 64}
    result = predict_model("tiny-llama-random", ["t4,h200"], **asked)
    assert {row["device"]: row["fits"] for row in result["devices"]} == {"t4": False, "h200": True}
    for devices in (["t4"], ["t4,l4"]):
        with pytest.raises(InfeasibleError, match=r"needs at least 33\.\d+ GiB .*, \w+ has"):
            predict_model("tiny-llama-random", devices, **asked)


def test_a_batch_beyond_all_memory_is_refused(folder: Path) -> None:
    with pytest.raises(InfeasibleError, match="100000000000 x 128 tokens, needs at least"):
        foreplan.rank_devices("gpt2", "h200,b200", batch=100_000_000_000, costs="roofline")
    for batch in (10**13, 10**18, 10**24):  # more than torch counts: in the pass, or its input
        with pytest.raises(SpecError, match=r"sizes \[.*\]', expected fewer than 2\^63 bytes") as e:
            predict_model("gpt2", ["h200"], batch=batch, costs="roofline")
        assert len(str(e.value)) < 250


def test_of_devices_whose_memory_is_not_known_the_kind_is(folder: Path) -> None:
    bare = device_zoo.device("t4").model_copy(update={"name": "bare", "memory_bytes": None})
    found = foreplan.rank_devices("tiny-llama-random", [bare, "t4,epyc_9755"]).document()
    kinds = {row["device"]: (row["device_kind"], row["fits"]) for row in found["devices"]}
    assert kinds == {"bare": ("cuda", None), "t4": ("cuda", True), "epyc_9755": ("cpu", None)}


def test_weights_that_are_none_are_refused_before_a_model_is_captured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def captured(*_: object, **__: object) -> None:
        raise AssertionError("captured first")

    monkeypatch.setattr("foreplan.cost_models.ranking.stored_steps", captured)
    with pytest.raises(SpecError, match="nowhere"):
        predict_model("tiny-llama-random", ["h200"], weights=str(folder / "nowhere"))


def test_python_ranks_as_the_command_does(folder: Path) -> None:
    asked: dict[str, Any] = {"sequence_length": 64, "costs": "roofline"}
    ranking = foreplan.rank_devices("tiny-llama-random", **asked)
    shown = predict_model("tiny-llama-random", ["all"], **asked)
    assert {**ranking.document(), "captured": "cache", "fit": None, "here": {}} == shown
    assert ranking.fastest.device == shown["devices"][0]["device"]
    frame = ranking.to_frame()
    assert list(frame["device"]) == [row["device"] for row in shown["devices"]]
    assert len(repr(ranking)) < 2000
    assert ranking.fastest.device in ranking._repr_html_()
    small = dataclasses.replace(ranking, fits=dict.fromkeys(ranking.fits, False))
    with pytest.raises(InfeasibleError, match="no device that has prices"):
        _ = small.fastest
    mine = device_zoo.device("t4").model_copy(update={"name": "mine"})
    named = foreplan.rank_devices("tiny-llama-random", [mine, "2xl4"], **asked)
    assert {replay.device for replay in named.replays} == {"mine", "l4"}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"devices": "nope"}, "rank_devices: devices: got 'nope'"),
        ({"devices": [3]}, "rank_devices: devices: got 3"),
        ({"devices": None}, "rank_devices: devices: got nothing"),
        ({"devices": []}, "rank_devices: devices: got nothing"),
        ({"phase": "train"}, "did you mean training"),
        ({"costs": "measured"}, "predict_latency takes the profile"),
        ({"batch": 2.5}, "rank_devices: batch: got 2.5, expected a whole number"),
        ({"launch_s": -1.0}, r"rank_devices: launch_s: got -1\.0"),
        ({"execution": "grap"}, "rank_devices: execution: got 'grap'"),
        ({"execution": "graph", "launch_s": 1e-6}, "rank_devices: launch_s"),
    ],
)
def test_wrong_questions_in_python(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        foreplan.rank_devices("tiny-llama-random", **{"devices": "t4", **fields})


def test_a_gpu_without_bf16_is_said(folder: Path) -> None:
    """Its price is fp16's, or fp32's: never silently what it was asked for."""
    asked = ["t4", "p4", "l4", "xeon_8380"]
    found = {
        dtype: predict_model("tiny-llama-random", asked, dtype=dtype) for dtype in ("bf16", "fp16")
    }
    assert found["bf16"]["bf16_as"] == {"t4": "fp16", "p4": "fp32"}
    assert found["fp16"]["bf16_as"] == {}
    assert instead_of_bf16("fp16") == "priced as fp16 there, and has to run so"
    assert "multiplied at fp32's rate" in instead_of_bf16("fp32")


def test_a_notebook_asks_with_numbers_of_numpy_and_dtypes(folder: Path) -> None:
    asked = {"batch": np.int64(2), "sequence_length": np.int32(16)}
    plain = foreplan.predict_latency("tiny-llama-random", "l4", batch=2, sequence_length=16)
    same = foreplan.predict_latency("tiny-llama-random", "l4", **asked)
    assert same.document() == plain.document()
    ranking = foreplan.rank_devices("tiny-llama-random", "l4", dtype="bf16", **asked)
    half = foreplan.predict_latency("tiny-llama-random", "l4", dtype="bf16", **asked)
    assert ranking.document()["dtype"] == "bf16"
    assert ranking.fastest.latency_s == half.latency_s != plain.latency_s
    assert len(repr(ranking)) < 120
    assert repr(ranking).startswith("<Ranking: tiny-llama-random, 2 x 16 tokens, inference: l4 ")
    for size in (True, 2.0, "2"):
        with pytest.raises(SpecError, match=r"predict_latency: batch: got .*a whole number"):
            foreplan.predict_latency("tiny-llama-random", "l4", batch=size)
    with pytest.raises(SpecError, match="a module has its own"):
        foreplan.predict_latency(nn.Linear(4, 4), "l4", inputs=(torch.ones(4),), dtype="bf16")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, as the compiler loads
def test_a_compiled_module_is_not_priced_as_an_eager_one() -> None:
    inside, in_place = nn.Sequential(torch.compile(nn.Linear(4, 4))), nn.Linear(4, 4)
    in_place.compile()
    for module, told in ((inside[0], "module'"), (inside, "module, 0'"), (in_place, "module'")):
        with pytest.raises(SpecError, match=f"got 'a compiled {told}, expected modules as they"):
            foreplan.predict_latency(module, "l4", inputs=(torch.ones(4),))


def test_figures_of_ones_own_stand_under_a_name_of_their_own(folder: Path) -> None:
    files = []
    for number, name in enumerate(("l4", "mine", "mine")):
        device = device_zoo.device("t4").model_copy(update={"name": name})
        files.append(folder / f"{number}.yaml")
        files[-1].write_text(json.dumps(device.model_dump(mode="json", exclude_none=True)))
    found = predict_model("tiny-llama-random", ["l4"], device_files=files[1:2])
    assert {row["device"] for row in found["devices"]} == {"l4", "mine"}
    for clash in (files[:1], files[1:]):
        with pytest.raises(SpecError, match=r"yaml: name: got '(l4|mine)', expected a name of its"):
            predict_model("tiny-llama-random", ["l4"], device_files=clash)


def test_a_device_named_twice_is_one_row(folder: Path) -> None:
    result = predict_model("tiny-llama-random", ["t4,t4", "T4"])
    assert [row["device"] for row in result["devices"]] == ["t4"]


def test_a_graph_is_predicted_without_its_host(folder: Path) -> None:
    asked = {"sequence_length": 64, "phase": "training"}
    eager = predict_model("tiny-llama-random", ["t4,xeon_8480+"], **asked)  # type: ignore[arg-type]
    graph = predict_model("tiny-llama-random", ["t4,xeon_8480+"], execution="graph", **asked)  # type: ignore[arg-type]
    (found,) = graph["devices"]
    one = next(row for row in eager["devices"] if row["device"] == "t4")
    assert found["device_s"] == one["device_s"]
    assert found["gap_s"] == pytest.approx((found["operators"] - 1) * GRAPH_GAP_S)
    assert found["host_s"] < one["host_s"]
    assert (found["execution"], one["execution"], one["gap_s"]) == ("graph", "eager", 0.0)
    assert graph["execution"] == "graph"
    assert "CPUs have no CUDA graphs" in graph["unpriced"]["xeon_8480+"]


def test_where_no_device_has_a_price_the_first_says_why() -> None:
    class Whole(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x

    numbers = torch.zeros(8, 8, dtype=torch.int32)
    with pytest.raises(MissingDataError, match=r"no device has a price: .* have no peak_flops of"):
        foreplan.rank_devices(Whole(), "t4,h200", inputs=[numbers])


def test_a_trace_is_written(folder: Path) -> None:
    path = folder / "trace.json"
    predict_model("tiny-llama-random", ["t4"], trace=path)
    assert "launch" in path.read_text()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"devices": ["nope"]}, SpecError, "--devices: got 'nope'"),
        ({"devices": []}, SpecError, "foreplan devices"),
        ({"model": "nope"}, SpecError, "name of the zoo"),
        ({"phase": "decode"}, SpecError, "inference, training"),
        ({"rank_by": "price"}, SpecError, "--rank-by"),
        ({"execution": "grap"}, SpecError, "did you mean graph"),
        ({"execution": "graph", "devices": ["epyc_7742"]}, SpecError, "expected a GPU"),
        ({"execution": "graph", "launch_s": 1e-6}, SpecError, "--launch-us"),
        ({"costs": "measured"}, SpecError, "--profile"),
        ({"batch": 0}, SpecError, "at least 1"),
        ({"launch_s": -5 / 1e6}, SpecError, "--launch-us: got -5.0, expected"),
        ({"launch_s": float("nan")}, SpecError, "--launch-us"),
        ({"trace": Path("t.json"), "devices": ["t4,h200"]}, SpecError, "expected one"),
        (
            {"model": "opt-125m", "devices": ["epyc_7742"], "costs": "roofline"},
            MissingDataError,
            "no cost",
        ),
    ],
)
def test_wrong_questions(
    change: dict[str, Any], error: type[Exception], match: str, folder: Path
) -> None:
    asked: dict[str, Any] = {"model": "tiny-llama-random", "devices": ["t4"], **change}
    with pytest.raises(error, match=match):
        predict_model(asked.pop("model"), asked.pop("devices"), **asked)


def test_public_names() -> None:
    loaded = foreplan.Predictor.load()
    work = program("linear", Variant("bf16", "bf16", "torch.linear"), rows=64, n=512, k=512)
    (estimate,) = loaded.predict([work], "h200")
    assert 0 < estimate.low_s < estimate.mean_s < estimate.high_s
    assert foreplan.predict_latency(small("gpt2"), GPU).device == "h200"
    assert len(programs(model_steps(small("gpt2"), batch=1, tokens=8))) > 5
