"""Recorded passes of GPUs, by workers whose times are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest

from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.ranks import recorded_passes
from foreplan.datasets.ranks.recorded_passes import measure_recorded
from foreplan.datasets.ranks.together import PassTimes
from foreplan.datasets.timing.measurement import Measurement
from foreplan.datasets.timing.measuring import Effort

WHOLE, OTHER, SLICE = (DeviceName.parse(f"cuda:{word}") for word in ("0", "1", "0/sms=32"))
ADD = Variant("bf16", "bf16", "torch.add")
LONG, SHORT = (program("elementwise_forward", ADD, rows=rows, cols=64) for rows in (8, 4))
#: A pass of 1 x 2 + 3 x 1 s.
CALLS, PRICES = {LONG: 1, SHORT: 3}, {LONG: 2.0, SHORT: 1.0}


class FakeWorker:
    """Takes 1 s and 0.1 s, a slice twice as long; ``broken`` cannot record the short one."""

    groups: ClassVar[list[set[str]]] = []
    broken: ClassVar[DeviceName | None] = None

    def __init__(self, device: DeviceName, *, cores: Sequence[int]) -> None:
        self.device, self.cores = device, cores

    def __enter__(self) -> FakeWorker:
        if not FakeWorker.groups or not FakeWorker.groups[-1]:
            FakeWorker.groups.append(set())
        FakeWorker.groups[-1].add(str(self.device))
        return self

    def __exit__(self, *raised: object) -> None:
        if FakeWorker.groups[-1]:
            FakeWorker.groups.append(set())

    def send_pass(
        self, calls: Sequence[tuple[Program, int]], effort: Effort, *, recorded: bool
    ) -> None:
        assert recorded
        assert list(calls) == list(CALLS.items())

    def receive_pass(self, count: int, effort: Effort) -> list[Measurement]:
        slow = 2.0 if self.device.sms else 1.0
        short = Measurement((0.1 * slow,), 1)
        if self.device == FakeWorker.broken:
            short = Measurement.failed("waits for the device")
        return [Measurement((1.0 * slow,), 1), short]


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_passes, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "groups", [])


def recorded(*devices: DeviceName) -> PassTimes:
    cores = [(k,) for k in range(len(devices))]
    return measure_recorded(devices, CALLS, dict.fromkeys(devices, PRICES), cores=cores)


def test_programs_of_a_recorded_pass_are_put_over_their_price() -> None:
    found = recorded(WHOLE)
    assert found.programs == {WHOLE: {LONG: 0.5, SHORT: 0.1}}
    assert found.factors == {1: pytest.approx((1.0 + 0.3) / 5.0)}


def test_gpus_are_timed_at_once_and_slices_of_one_in_turn() -> None:
    found = recorded(WHOLE, OTHER, SLICE)
    assert [group for group in FakeWorker.groups if group] == [{"cuda:0", "cuda:1"},
                                                               {"cuda:0/sms=32"}]  # fmt: skip
    assert found.programs[SLICE] == {LONG: 1.0, SHORT: 0.2}
    assert found.factors[1] == pytest.approx((2 * 1.3 + 2.6) / 3 / 5.0)


def test_what_cannot_be_recorded_keeps_its_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeWorker, "broken", WHOLE)
    found = recorded(WHOLE)
    assert found.programs == {WHOLE: {LONG: 0.5}}
    assert found.factors == {1: pytest.approx((1.0 + 3.0) / 5.0)}
