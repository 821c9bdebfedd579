"""Programs behind one another, on a device whose clock counts calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from foreplan.datasets.kernels.cold_operands import InTurn
from foreplan.datasets.kernels.runnable import Inputs
from foreplan.datasets.timing import _pass_timing, recorded_programs
from foreplan.datasets.timing._pass_timing import PassTimer

EFFORT = {"min_s": 0.0, "min_samples": 2, "max_s": 60.0, "max_samples": 100}


class Clock:
    """A call takes as long as its operand has elements; notes which ran."""

    def __init__(self, word: str = "cpu") -> None:
        self.word, self.preempted, self.wall_s = word, 0, 0.0
        self.stream = "stream"
        self.ran: list[Any] = []

    def time_calls(self, call: Callable[[], object], count: int) -> float:
        assert count == 1
        call()
        self.ran.append(call)
        self.wall_s += 2.0
        return 1.0

    def measure(self, call: Any, effort: Any, turns: Any, before: Any = None) -> dict[str, Any]:
        self.time_calls(call, 1)
        told = {"times_s": [1.0], "mean_s": 1.0, "samples": 1, "calls": 1, "issue_s": 0.5}
        return {**told, "how": "alone"}


def asked(op: str, calls: int, **dims: int) -> dict[str, Any]:
    return {"op": op, "dims": dims, "variant": "fp32/fp32/torch.gelu", "calls": calls}


GELU = asked("activation_forward", 3, rows=4, cols=8)
BACK = asked("activation_backward", 1, rows=4, cols=8)


def answer(
    clock: Clock, *programs: dict[str, Any], keep: bool = False, recorded: bool = False
) -> list[dict[str, Any]]:
    timer = PassTimer(clock, Inputs("cpu"))
    request = {"pass": programs, "effort": EFFORT, "keep": keep, "recorded": recorded}
    with torch.inference_mode():
        found = timer.answer(request)
    return list(found["pass"])


def test_programs_run_in_turn_each_on_as_many_operands_as_a_pass_has() -> None:
    clock = Clock()
    first, second = answer(clock, GELU, BACK)
    assert first["samples"] == 6, "three calls in each of two passes"
    assert second["samples"] == 2
    assert first["mean_s"] == 2.0, "time on the wall"
    assert first["times_s"] == (1.0,) * 6
    forward, backward = clock.ran[:2]
    one = [forward, backward, forward, forward]
    assert clock.ran == one * (2 + _pass_timing._WARM_PASSES)
    assert isinstance(forward, InTurn)
    assert len(backward.sets) == 1
    assert len(forward.sets) == len(forward.results) == 3
    assert len(backward.results) == 1, "gradients are freed as soon as they are passed on"


def test_what_the_operator_before_has_written_is_written_before_each_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    run = InTurn.__call__
    monkeypatch.setattr(InTurn, "warm_up", lambda self: done.append("written"))
    monkeypatch.setattr(InTurn, "__call__", lambda self: (done.append("called"), run(self)))
    answer(Clock(), BACK)
    assert done[-4:] == ["written", "called"] * 2


def test_a_program_that_fails_says_why_and_the_others_run() -> None:
    strange = asked("activation_forward", 1, rows=4, cols=8) | {"variant": "fp32/fp32/torch.no"}
    failed, ran = answer(Clock(), strange, BACK)
    assert failed["samples"] == 0
    assert failed["error"]
    assert ran["samples"] == 2


def test_inputs_are_kept_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    timer = PassTimer(clock, Inputs("cpu"))
    request = {"pass": [BACK], "effort": EFFORT, "keep": True, "recorded": False}
    with torch.inference_mode():
        timer.answer(request)
        again = timer.answer(request)
    assert len(set(map(id, clock.ran))) == 1
    assert again["pass"][0]["samples"] == 2, "times of the turn before do not count"


def test_a_gpu_times_each_as_a_profile_does() -> None:
    clock = Clock("cuda:0")
    (told,) = answer(clock, GELU)
    assert told == {"times_s": [1.0], "mean_s": 1.0, "samples": 1, "calls": 1, "issue_s": 0.5}


def test_a_gpu_times_programs_as_parts_of_a_recorded_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_of: list[Any] = []

    def recorded(calls: Any, stream: Any) -> list[float | None]:
        asked_of.extend(calls)
        assert stream == "stream"
        return [2.0, None, None]

    monkeypatch.setattr(recorded_programs, "recorded_seconds", recorded)
    strange = asked("activation_forward", 1, rows=4, cols=8) | {"variant": "fp32/fp32/torch.no"}
    first, unknown, unrecorded = answer(Clock("cuda:0"), GELU, strange, BACK, recorded=True)
    assert first == {"times_s": (2.0,), "mean_s": 2.0, "samples": 1, "calls": 1}
    assert "torch.no" in unknown["error"]
    assert unrecorded["error"] == "RuntimeError: it cannot be recorded as a CUDA graph"
    (turns, calls), (none, _), _ = asked_of
    assert (len(turns), calls, none) == (len(turns[0].sets), 3, [])
