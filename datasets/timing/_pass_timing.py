"""`PassTimer`: programs timed as a pass runs them, one behind the other. Imports torch.

A profile times a program on operands that no cache holds. In a step some are left in the caches:
by the pass before, as far as what ran since has not taken their place; how far depends on what the
pass uses in all, and on what other ranks use of a cache that they share. So all programs of a pass
are called in turn, again and again, on as many operands as the pass has. Before each call what the
operator before it has just written in a step is written again.

A GPU times each by itself, as a profile does, or all as parts of a pass that is one CUDA graph
(`foreplan.datasets.timing.recorded_programs`).
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from foreplan.datasets.kernels.cold_operands import InTurn
from foreplan.datasets.kernels.runnable import Inputs, Runnable
from foreplan.datasets.program import Variant, program
from foreplan.datasets.timing.graph_timer import Call
from foreplan.datasets.timing.measurement import Measurement, thin

#: Passes before the ones that count.
_WARM_PASSES = 2


class TimingDevice(Protocol):
    """What times calls in a measuring process (`foreplan.datasets.timing._measuring_worker`)."""

    word: str
    stream: Any
    preempted: int
    wall_s: float

    def time_calls(self, call: Callable[[], object], count: int) -> float: ...

    def measure(
        self, call: Callable[[], object], effort: Mapping[str, Any], turns: int | None,
        before: Callable[[], object] | None = None,
    ) -> dict[str, Any]: ...  # fmt: skip


class PassTimer:
    """Answers requests of `foreplan.datasets.timing.measuring.Worker.send_pass`.

    Args:
        device: times calls.
        inputs: make programs runnable.
    """

    def __init__(self, device: TimingDevice, inputs: Inputs) -> None:
        self._device, self._inputs = device, inputs
        self._kept: dict[str, list[_Member]] = {}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """One measurement a program under ``pass``; a program that fails has an ``error``."""
        if request["recorded"] and self._device.word != "cpu":
            members = self._recorded(request["pass"])
            return {"pass": [member.told() for member in members], "fatal": False}
        key = str(request["pass"])
        members = self._kept.get(key) or [_Member(one, self._inputs) for one in request["pass"]]
        if request["keep"]:
            self._kept[key] = members
        effort = request["effort"]
        if self._device.word != "cpu":
            for member in members:
                member.time_alone(self._device, effort)
        else:
            self._in_turn([member for member in members if member.error is None], effort)
        fatal = self._device.word != "cpu" and any(member.error for member in members)
        return {"pass": [member.told() for member in members], "fatal": fatal}

    def _recorded(self, asked: Sequence[Mapping[str, Any]]) -> list[_Member]:
        from foreplan.datasets.timing.recorded_programs import recorded_seconds

        members = [_Member(one, self._inputs) for one in asked]
        with torch.inference_mode(False), torch.enable_grad():
            calls = [(member.turns, member.calls) for member in members]
            found = recorded_seconds(calls, self._device.stream)
            for member, seconds in zip(members, found, strict=True):
                member.take(seconds)
        return members

    def _in_turn(self, members: Sequence[_Member], effort: Mapping[str, Any]) -> None:
        most = max((member.calls for member in members), default=0)
        # In a pass equal programs do not follow each other.
        order = [member for turn in range(most) for member in members if turn < member.calls]
        for _ in range(_WARM_PASSES):
            for member in order:
                member.call(self._device)
        for member in members:
            member.forget()
        started, passes = time.perf_counter(), 0
        collecting = gc.isenabled()
        gc.disable()
        try:
            while members:
                for member in order:
                    member.call(self._device)
                passes += 1
                spent = time.perf_counter() - started
                enough = passes >= effort["min_samples"] and spent >= effort["min_s"]
                if enough or spent >= effort["max_s"] or passes >= effort["max_samples"]:
                    return
        finally:
            if collecting:
                gc.enable()


class _Member:
    """A program of a pass, with its calls and their times."""

    def __init__(self, asked: Mapping[str, Any], inputs: Inputs) -> None:
        self.error: str | None = None
        self.calls = int(asked["calls"])
        self._runnable: Runnable | None = None
        self.forget()
        self._found: dict[str, Any] = {}
        try:
            wanted = program(asked["op"], Variant.parse(asked["variant"]), **asked["dims"])
            made = inputs.runnable(wanted)
            if inputs.kind == "cpu" and isinstance(made.call, InTurn):
                call = made.call.limited(self.calls)
                made = replace(made, call=call, turns=len(call.sets))
            self._runnable = made
        except Exception as error:  # a kernel may fail in any way
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self.error = Measurement.failed(f"{type(error).__name__}: {error}").error

    def forget(self) -> None:
        """Drop the times so far."""
        self._times: list[float] = []
        self._wall_s, self._preempted = 0.0, 0

    def call(self, device: TimingDevice) -> None:
        """Run the program once."""
        runnable = self._runnable
        if runnable is None or self.error is not None:
            return
        device.wall_s, device.preempted = 0.0, 0
        with contextlib.ExitStack() as modes:
            if isinstance(runnable.call, InTurn):  # of a training step: recorded by autograd
                modes.enter_context(torch.inference_mode(False))
                modes.enter_context(torch.enable_grad())
            try:
                if runnable.before is not None:
                    runnable.before()
                if isinstance(runnable.call, InTurn):
                    runnable.call.warm_up()
                self._times.append(device.time_calls(runnable.call, 1))
            except Exception as error:  # a kernel may fail in any way
                self._failed(error)
        self._wall_s += device.wall_s
        self._preempted += device.preempted

    @property
    def turns(self) -> list[Call]:
        """The call on each set of its operands; nothing of a program that fails."""
        if self._runnable is None:
            return []
        return [self._runnable.call] * (self._runnable.turns or 1)

    def take(self, seconds: float | None) -> None:
        """Keep a time of a call that was measured elsewhere; ``None`` if it cannot be recorded."""
        if self.error is not None:
            return
        if seconds is None:
            self.error = "RuntimeError: it cannot be recorded as a CUDA graph"
        else:
            self._found = {"times_s": (seconds,), "mean_s": seconds, "samples": 1, "calls": 1}

    def time_alone(self, device: TimingDevice, effort: Mapping[str, Any]) -> None:
        """Time the program as a profile does."""
        runnable = self._runnable
        if runnable is None:
            return
        try:
            found = device.measure(runnable.call, effort, runnable.turns, runnable.before)
        except Exception as error:  # a kernel may fail in any way
            self._failed(error)
            return
        told = ("times_s", "mean_s", "samples", "calls", "issue_s")
        self._found = {k: found[k] for k in told if k in found}

    def told(self) -> dict[str, Any]:
        """The measurement, as its fields."""
        if self.error is not None:
            return {"times_s": [], "samples": 0, "error": self.error}
        if self._found:
            return self._found
        samples = len(self._times)
        return {
            "times_s": thin(self._times), "mean_s": self._wall_s / max(1, samples),
            "samples": samples, "preempted": self._preempted,
            "cache_state": "as the pass before left them",
        }  # fmt: skip
