"""Passes of ranks at work together, by workers whose times are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.ranks import together
from foreplan.datasets.ranks.together import measure_together
from foreplan.datasets.timing.measurement import Measurement
from foreplan.datasets.timing.measuring import Effort
from foreplan.errors import MissingDataError

CPU = DeviceName.parse("cpu:threads=1")
SLOW = DeviceName.parse("cpu:threads=1,isa=avx2")
ADD = Variant("fp32", "fp32", "torch.add")
LONG, SHORT = (program("elementwise_forward", ADD, rows=rows, cols=64) for rows in (8, 4))


class FakeWorker:
    """Takes 2 s and 1 s, times ``factor``; on ``SLOW`` four times as long."""

    at_work: ClassVar[set[int]] = set()
    broken: ClassVar[int | None] = None
    groups: ClassVar[set[tuple[int, ...]]] = set()
    factor: ClassVar[float] = 1.0

    def __init__(self, device: DeviceName, *, cores: Sequence[int]) -> None:
        self.device, self._core = device, cores[0]

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *raised: object) -> None:
        return

    def send_pass(
        self, calls: Sequence[tuple[Program, int]], effort: Effort, *, keep: bool
    ) -> None:
        assert keep
        assert list(calls) == [(LONG, 1), (SHORT, 3)]
        FakeWorker.at_work.add(self._core)

    def receive_pass(self, count: int, effort: Effort) -> list[Measurement]:
        together = tuple(sorted(FakeWorker.at_work))
        FakeWorker.groups.add(together)
        if self._core == together[-1]:
            FakeWorker.at_work.clear()
        if FakeWorker.broken == self._core:
            return [Measurement.failed("no such kernel")] * count
        slow = (4.0 if self.device == SLOW else 1.0) * FakeWorker.factor
        return [Measurement((seconds * slow,), 1) for seconds in (2.0, 1.0)]


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "groups", set())
    monkeypatch.setattr(FakeWorker, "at_work", set())


def measured(devices: Sequence[DeviceName], price_s: dict[DeviceName, float], **more: Any) -> Any:
    return measure_together(
        devices, {LONG: 1, SHORT: 3}, price_s, cores=[(k,) for k in range(len(devices))],
        counts=(1, 2, 3), repeats=3, measure_s=0.0, **more,
    )  # fmt: skip


def test_times_are_put_over_prices_rank_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of 2 + 3 x 1 s costs 4 s; a slow rank's, four times as long, costs 10."""
    found = measured([CPU, CPU, CPU], {CPU: 4.0})
    assert found == pytest.approx({1: 1.25, 2: 1.25, 3: 1.25})
    monkeypatch.setattr(FakeWorker, "factor", 1.2)
    found = measured([CPU, SLOW, CPU], {CPU: 4.0, SLOW: 10.0})
    assert found == pytest.approx({1: 1.2 * (1.25 + 2 + 1.25) / 3, 2: 1.2 * (1.25 + 2) / 2,
                                   3: 1.2 * (1.25 + 2 + 1.25) / 3})  # fmt: skip


def test_all_ranks_take_part_in_whole_groups_of_neighbours() -> None:
    measured([CPU] * 3, {CPU: 4.0})
    assert FakeWorker.groups == {(0,), (1,), (2,), (0, 1), (0, 1, 2)}


def test_a_rank_that_cannot_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeWorker, "broken", 1)
    with pytest.raises(MissingDataError, match="no such kernel"):
        measured([CPU] * 3, {CPU: 4.0})
