"""What a GPU's host takes to issue a call is measured beside the call; the GPU is pretended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch

from foreplan.datasets.kernels.cold_operands import InTurn
from foreplan.datasets.timing._measuring_worker import _Device
from foreplan.datasets.timing.measuring import Effort

#: Seconds that the host spends in a call.
_HOST_S = 2e-4


class Gpu(_Device):
    """A GPU on which a call takes ``call_s`` seconds by its own clock.

    Args:
        call_s: of a call that is issued; one of a graph takes a quarter.
        recording: how many calls were recorded is added; ``None``: nothing can be.
    """

    def __init__(self, call_s: float, recording: list[int] | None = None) -> None:
        self.torch, self.word, self.stream = torch, "cuda:0", None
        self.one_thread, self.preempted, self.wall_s = False, 0, 0.0
        self.call_s, self._recording = call_s, recording

    def recorded(self, call: Callable[[], object], count: int) -> object:
        if self._recording is None:
            return None
        self._recording.append(count)
        return call

    def time_replay(self, graph: object, count: int) -> float:
        return self.call_s / 4

    def time_calls(self, call: Callable[[], object], count: int) -> float:
        for _ in range(count):
            call()
        return self.call_s


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)


def measured(
    call_s: float, call: Callable[[], object], *, turns: int = 1, recording: list[int] | None = None
) -> dict[str, Any]:
    return Gpu(call_s, recording).measure(call, asdict(Effort(min_s=0.0, max_s=0.1)), turns)


def test_a_short_call_says_what_its_host_takes() -> None:
    found = measured(1e-3, lambda: time.sleep(_HOST_S))
    assert _HOST_S <= found["issue_s"] < 100 * _HOST_S
    assert found["times_s"][0] == 1e-3, "which is not the device's time"


def test_a_long_call_does_not() -> None:
    assert "issue_s" not in measured(3e-3, lambda: None)
    assert "issue_s" not in measured(1.0, lambda: None)


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("recording", [None, []])
def test_passes_of_training_are_recorded_for_their_gradients(
    outside: bool, recording: list[int] | None
) -> None:
    seen: list[bool] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_grad_enabled() and not torch.is_inference_mode_enabled())
        return x

    call = InTurn(run, [[torch.ones(1)]], deque([torch.ones(1)]), [])
    with torch.inference_mode(outside):
        assert measured(1e-3, call, recording=recording)["issue_s"] > 0
    assert all(seen)


def test_a_call_is_replayed_on_all_of_its_operands_and_what_cannot_be_recorded_is_issued() -> None:
    recording: list[int] = []
    found = measured(1e-3, lambda: None, turns=37, recording=recording)
    assert recording == [37]
    assert (found["times_s"][0], found["how"]) == (2.5e-4, "; replayed from a CUDA graph")
    issued = measured(1e-3, lambda: None, turns=37)
    assert issued["times_s"][0] == 1e-3
    assert "how" not in issued
