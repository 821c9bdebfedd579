"""Passes of ranks at work together, by workers whose times are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest

from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.ranks import together
from foreplan.datasets.ranks.together import PassTimes, measure_together
from foreplan.datasets.timing.measurement import Measurement
from foreplan.datasets.timing.measuring import Effort
from foreplan.errors import MissingDataError

CPU = DeviceName.parse("cpu:threads=1")
SLOW = DeviceName.parse("cpu:threads=1,isa=avx2")
ADD = Variant("fp32", "fp32", "torch.add")
LONG, SHORT = (program("elementwise_forward", ADD, rows=rows, cols=64) for rows in (8, 4))


class FakeWorker:
    """Takes 2 s and 1 s, times ``factor``; on ``SLOW`` four times as long, the second eight."""

    at_work: ClassVar[set[int]] = set()
    broken: ClassVar[int | None] = None
    groups: ClassVar[set[tuple[int, ...]]] = set()
    factor: ClassVar[float] = 1.0
    pace: ClassVar[float] = 1.0
    luck: ClassVar[tuple[float, ...]] = (1.0,)
    asked: ClassVar[int] = -1

    def __init__(self, device: DeviceName, *, cores: Sequence[int]) -> None:
        self.device, self._core = device, cores[0]

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *raised: object) -> None:
        return

    def measure(self, item: Program, effort: Effort, *, keep: bool) -> Measurement:
        """By itself it takes its price, times the host's pace."""
        assert keep
        if FakeWorker.broken == self._core:
            return Measurement.failed("no such kernel")
        FakeWorker.asked += 1
        luck = FakeWorker.luck[FakeWorker.asked // len(PRICES[CPU]) % len(FakeWorker.luck)]
        return Measurement((PRICES[self.device][item] * FakeWorker.pace * luck,), 1)

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
        slow = (4.0, 8.0) if self.device == SLOW else (1.0, 1.0)
        times = zip((2.0, 1.0), slow, strict=True)
        scale = FakeWorker.factor * FakeWorker.pace
        return [Measurement((seconds * more * scale,), 1) for seconds, more in times]


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "groups", set())
    monkeypatch.setattr(FakeWorker, "at_work", set())


#: Prices of calls: a pass costs 4 s, and 10.
PRICES = {CPU: {LONG: 1.0, SHORT: 1.0}, SLOW: {LONG: 4.0, SHORT: 2.0}}


def measured(devices: Sequence[DeviceName], counts: Sequence[int] = (1, 2, 3)) -> PassTimes:
    return measure_together(
        devices, {LONG: 1, SHORT: 3}, {name: PRICES[name] for name in set(devices)},
        cores=[(k,) for k in range(len(devices))], counts=counts, repeats=3, measure_s=0.0,
    )  # fmt: skip


def test_times_are_put_over_prices_rank_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of 2 + 3 x 1 s costs 4 s; a slow rank's, of 8 + 3 x 8, costs 10."""
    found = measured([CPU, CPU, CPU])
    assert found.factors == pytest.approx({1: 1.25, 2: 1.25, 3: 1.25})
    monkeypatch.setattr(FakeWorker, "factor", 1.2)
    found = measured([CPU, SLOW, CPU])
    assert found.factors == pytest.approx({1: 1.2 * (1.25 + 3.2 + 1.25) / 3,
                                           2: 1.2 * (1.25 + 3.2) / 2,
                                           3: 1.2 * (1.25 + 3.2 + 1.25) / 3})  # fmt: skip


def test_one_rank_alone_is_put_over_the_price_of_each_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeWorker, "factor", 1.1)
    found = measured([CPU, SLOW, CPU])
    assert found.programs[CPU] == pytest.approx({LONG: 2.2, SHORT: 1.1})
    assert found.programs[SLOW] == pytest.approx({LONG: 2.2, SHORT: 4.4})
    # The factors of the programs are those of the pass, weighted by their prices.
    assert found.programs[CPU][LONG] / 4 + found.programs[CPU][SHORT] * 3 / 4 == pytest.approx(
        measured([CPU, CPU], counts=(1,)).factors[1]
    )
    assert measured([CPU, CPU], counts=(2,)).programs == {CPU: {}}


@pytest.mark.parametrize("pace", [0.8, 1.3])
def test_a_host_that_has_changed_its_speed_is_no_part_of_it(
    pace: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = measured([CPU, SLOW], counts=(1, 2))
    monkeypatch.setattr(FakeWorker, "pace", pace)
    after = measured([CPU, SLOW], counts=(1, 2))
    assert after.factors == pytest.approx(before.factors)
    for device, programs in before.programs.items():
        assert after.programs[device] == pytest.approx(programs)


def test_a_host_whose_speed_scatters_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one core takes now is luck: the mean of all ranks stands as it was measured."""
    monkeypatch.setattr(FakeWorker, "pace", 1.3)
    monkeypatch.setattr(FakeWorker, "asked", -1)
    monkeypatch.setattr(FakeWorker, "luck", (0.6, 1.5, 0.8))
    assert measured([CPU, CPU], counts=(1, 2)).factors == pytest.approx({1: 1.625, 2: 1.625})
    monkeypatch.setattr(FakeWorker, "asked", -1)
    monkeypatch.setattr(FakeWorker, "luck", (0.99, 1.01, 1.0))
    assert measured([CPU, CPU], counts=(1, 2)).factors == pytest.approx({1: 1.25, 2: 1.25})


def test_all_ranks_take_part_in_whole_groups_of_neighbours() -> None:
    measured([CPU] * 3)
    assert FakeWorker.groups == {(0,), (1,), (2,), (0, 1), (0, 1, 2)}


def test_a_rank_that_cannot_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeWorker, "broken", 1)
    with pytest.raises(MissingDataError, match="no such kernel"):
        measured([CPU] * 3)


def test_several_passes_count_by_their_mean() -> None:
    first = PassTimes({1: 0.8, 2: 1.2}, {CPU: {LONG: 0.5, SHORT: 1.0}})
    second = PassTimes({1: 1.0, 2: 1.6}, {CPU: {LONG: 0.7}})
    found = PassTimes.mean([first, second])
    assert found.factors == {1: pytest.approx(0.9), 2: pytest.approx(1.4)}
    assert found.programs == {CPU: {LONG: pytest.approx(0.6), SHORT: pytest.approx(1.0)}}
    assert PassTimes.mean([first]) == first
