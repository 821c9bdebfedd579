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
    """A GPU on which a call takes ``call_s`` seconds by its own clock."""

    def __init__(self, call_s: float) -> None:
        self.torch, self.word, self.stream = torch, "cuda:0", None
        self.one_thread, self.preempted, self.wall_s = False, 0, 0.0
        self.call_s = call_s

    def time_calls(self, call: Callable[[], object], count: int) -> float:
        for _ in range(count):
            call()
        return self.call_s


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)


def measured(call_s: float, call: Callable[[], object]) -> dict[str, Any]:
    return Gpu(call_s).measure(call, asdict(Effort(min_s=0.0, max_s=0.1)), None)


def test_a_short_call_says_what_its_host_takes() -> None:
    found = measured(1e-3, lambda: time.sleep(_HOST_S))
    assert _HOST_S <= found["issue_s"] < 100 * _HOST_S
    assert found["times_s"][0] == 1e-3, "which is not the device's time"


def test_a_long_call_does_not() -> None:
    assert "issue_s" not in measured(3e-3, lambda: None)
    assert "issue_s" not in measured(1.0, lambda: None)


@pytest.mark.parametrize("outside", [True, False])
def test_passes_of_training_are_recorded_for_their_gradients(outside: bool) -> None:
    seen: list[bool] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_grad_enabled() and not torch.is_inference_mode_enabled())
        return x

    call = InTurn(run, [[torch.ones(1)]], deque([torch.ones(1)]), [])
    with torch.inference_mode(outside):
        assert measured(1e-3, call)["issue_s"] > 0
    assert all(seen)
