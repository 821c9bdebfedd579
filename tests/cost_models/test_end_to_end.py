"""The end-to-end check: networks are run, their operators timed, and both replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from foreplan.cost_models.costs import CostBook
from foreplan.cost_models.end_to_end import main, measure, score
from foreplan.cost_models.end_to_end_networks import build, example
from foreplan.cost_models.graph_programs import lower
from foreplan.cost_models.host_call import HostCall
from foreplan.cost_models.host_prices import MODES, HostPrices, Issue, calibrate, python_lines
from foreplan.cost_models.replay import replay
from foreplan.datasets import device_zoo
from foreplan.datasets.capture import capture

CPU = device_zoo.device("xeon_8480+")


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return measure("cpu", size="tiny", networks=["llama", "convnext"], seconds=0.02, rounds=1,
                   calibration=["gpt_neox"])  # fmt: skip


def test_document_and_score(measured: dict[str, Any]) -> None:
    assert len(measured["cases"]) == 4
    assert set(measured["host"]["factor"]) == set(MODES)
    assert measured["figures"]["kind"] == "cpu"
    for case in measured["cases"]:
        # What was measured, put in the place of the truth, is replayed without error.
        alone = score({**measured, "cases": [case]}, CPU)
        case = {**case, "real_s": alone["cases"][0]["latency_s"]["measured"]}
        again = score({**measured, "cases": [case]}, CPU)
        assert again["cases"][0]["error"]["measured"] == pytest.approx(0.0)
        assert again["mape"][case["phase"]]["measured"] == pytest.approx(0.0)


def test_a_sum_is_never_longer_than_a_replay(measured: dict[str, Any]) -> None:
    for row in score(measured, CPU)["cases"]:
        assert row["latency_s"]["sum"] <= row["latency_s"]["measured"] * (1 + 1e-9)


def test_score_by_command(
    measured: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(measured))
    main(["score", str(path)])
    assert set(json.loads(capsys.readouterr().out)["mape"]) == {"inference", "training"}


def test_a_slow_host_decides(measured: dict[str, Any]) -> None:
    gpu = device_zoo.device("h200")
    slow = {kind: dict.fromkeys(MODES, 1.0) for kind in measured["host"]["call_s"]}
    host = {**measured["host"], "call_s": slow, "factor": dict.fromkeys(MODES, 1.0)}
    # Without figures of its own the document is of a GPU.
    document = {**measured, "figures": None, "host": host, "cases": measured["cases"][:1]}
    (row,) = score(document, gpu)["cases"]
    assert row["limit"] == "host"
    assert row["latency_s"]["measured"] > row["latency_s"]["predicted_published_launch"]
    assert replay([], CostBook(()), gpu).latency_s == 0.0


PRICES = HostPrices(
    {"view": dict.fromkeys(MODES, 1.0), "add": dict.fromkeys(MODES, 2.0),
     "conv 1": {"inference": 5.0, "forward": 6.0, "backward": 12.0}},
    (10.0, 3.0), dict.fromkeys(MODES, 1.0), dict.fromkeys(MODES, 0.0),
)  # fmt: skip
#: A convolution behind two views, read twice; something without a price of its own or gradients.
ISSUE = Issue([HostCall("conv 1", 2, True, 1), HostCall("roll", 0, False, 0)], 100, 4)


def test_the_host_is_a_sum_over_kinds_of_calls() -> None:
    assert PRICES.sum_s(ISSUE, "inference") == 5 + 2 + 2
    assert PRICES.sum_s(ISSUE, "backward") == 12 + 2 + 2
    assert PRICES.part_seconds(ISSUE, "inference") == {"forward": 9.0}
    assert PRICES.part_seconds(ISSUE, "training") == {
        "forward": 10.0, "backward": 16.0, "optimizer": 22.0}  # fmt: skip


def test_calibration_finds_factor_and_price_of_a_line() -> None:
    issues = [
        Issue([*ISSUE.calls] * count, lines, 0) for count, lines in ((1, 900), (3, 200), (7, 50))
    ]
    truth = HostPrices(PRICES.call_s, PRICES.update_s, dict.fromkeys(MODES, 1.5),
                       dict.fromkeys(MODES, 0.01))  # fmt: skip
    seen = []
    for issue in issues:
        training = truth.part_seconds(issue, "training")
        seen.append((issue, {"inference": truth.part_seconds(issue, "inference")["forward"],
                             "forward": training["forward"],
                             "backward": training["backward"]}))  # fmt: skip
    found = calibrate(PRICES, seen)
    assert found.factor == pytest.approx(truth.factor)
    assert found.line_s == pytest.approx({"inference": 0.01, "forward": 0.01, "backward": 0.0})
    assert HostPrices.load(found.document()) == found


def test_launches_add_up_to_the_parts(measured: dict[str, Any]) -> None:
    inputs = example("convnext", "tiny", (1, 32), "cpu", torch.float32)
    graph = capture(build("convnext", "tiny").eval(), inputs, eager=True)
    issue = Issue.of(lower(graph), tensors=len(graph.parameters), lines=10)
    prices = HostPrices.load(measured["host"])
    for phase in ("inference", "training"):
        steps = lower(graph, phase)
        assert len(issue.calls) == sum(step.part == "forward" for step in steps)
        whole = sum(prices.part_seconds(issue, phase).values())
        assert sum(prices.launches(steps, issue, phase)) == pytest.approx(whole)
    assert {call.kind for call in issue.calls} >= {"conv grouped", "linear bias", "layer_norm"}


def test_lines_are_counted_and_not_those_of_c() -> None:
    def three() -> None:
        x = 1
        x += 1
        sorted([x])

    assert python_lines(three) == 3
