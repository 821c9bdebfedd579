"""What calls lose in recorded passes of small networks."""

from __future__ import annotations

import pytest
import torch
from tests.cost_models.clocked_cuda import install

from foreplan.cost_models.passes import graph_switch
from foreplan.cost_models.passes.call_times import CallSeconds
from foreplan.cost_models.passes.graph_switch import SwitchRow, switch_rows, switch_seconds


def test_the_median_pass_of_a_phase_says_it() -> None:
    lost = {"inference": (1e-7, 3e-7, 9e-7), "training": (4e-7,)}
    rows = [
        SwitchRow("a", phase, 50, 1e-3 + 50 * seconds, 1e-3)  # type: ignore[arg-type]
        for phase, found in lost.items()
        for seconds in found
    ]
    assert switch_seconds(rows, "inference") == pytest.approx(3e-7)
    assert switch_seconds(rows, "training") == pytest.approx(4e-7)
    assert switch_seconds(rows[:3], "training") is None
    quicker = [SwitchRow("a", "training", 50, 9e-4, 1e-3)]
    assert switch_seconds(quicker, "training") == 0.0


def test_rows_are_of_calls_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    asked: list[list[str]] = []

    def timed(steps, device, seconds, executions):  # type: ignore[no-untyped-def]
        asked.append(executions)
        return {
            (s.key, s.mode): CallSeconds(None, None, 0.0 if s.view else 2e-6) for s in steps
        }  # fmt: skip

    monkeypatch.setattr(graph_switch, "time_calls", timed)
    rows = list(switch_rows("cpu", torch.float32, ["distilbert"], size="tiny"))
    assert [(row.network, row.phase) for row in rows] == [
        ("distilbert", "inference"), ("distilbert", "training")]  # fmt: skip
    assert asked == [["graph"]] * 2
    assert all(row.alone_s == pytest.approx(2e-6 * row.calls) for row in rows)
    assert rows[1].calls > 2 * rows[0].calls > 0


def test_a_call_without_a_time_leaves_its_pass_out(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)

    def timed(steps, *_):  # type: ignore[no-untyped-def]
        found = {(s.key, s.mode): CallSeconds(None, None, 1e-6) for s in steps}
        return found | {next(iter(found)): None}

    def queued(steps, *_):  # type: ignore[no-untyped-def]
        return {(s.key, s.mode): CallSeconds(1e-6, 1e-6, None, "no graph") for s in steps}

    for broken in (timed, queued):
        monkeypatch.setattr(graph_switch, "time_calls", broken)
        assert not list(switch_rows("cpu", torch.float32, ["distilbert"], size="tiny"))
