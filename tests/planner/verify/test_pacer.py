"""The machine timed between rounds, by a fleet without processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from foreplan.datasets.cluster import Cluster
from foreplan.datasets.cluster_entry import Rank
from foreplan.datasets.program import Program
from foreplan.datasets.specs import validate
from foreplan.datasets.timing.measurement import Measurement
from foreplan.datasets.timing.measuring import Effort
from foreplan.errors import MissingDataError
from foreplan.planner.pace import PaceProgram, RankPace
from foreplan.planner.verify import pace_process
from foreplan.planner.verify.answers import seconds_of
from foreplan.planner.verify.group import RankFailed
from foreplan.planner.verify.launch import Fleet
from foreplan.planner.verify.pace_process import keep_pace
from foreplan.planner.verify.pacer import Pacer, between, pace_of
from foreplan.planner.verify.session import Job
from foreplan.planner.verify.wire import Wire, WireClosed, WireGarbled

DEVICES = [{"name": "cpu:threads=1"}, {"name": "cpu:threads=1,isa=avx2"}]
RANKS = validate(Cluster, {"devices": DEVICES}, "cluster").ranks()


def timed(rows: int, expected_s: float, priced_s: float, calls: int) -> PaceProgram:
    return PaceProgram(
        op="add", dims={"rows": rows, "cols": 64}, variant="bf16/bf16/torch.add",
        expected_s=expected_s, priced_s=priced_s, calls=calls,
    )  # fmt: skip


LONG, SHORT = timed(8, 0.2, 3.0, 3), timed(4, 0.1, 1.0, 2)
PACE = [RankPace(device=RANKS[1].label, programs=(LONG, SHORT))]


class Told:
    """A fleet whose one group answers each turn with the next times."""

    def __init__(self, turns: Sequence[Any]) -> None:
        self.free_bytes = {"localhost": 1000}
        self.started: list[Job] = []
        self.members: list[int] = []
        self.stopped = 0
        self._turns = list(turns)

    def start(self, jobs: Sequence[Job], members: Sequence[int], timeout_s: float) -> Any:
        self.started, self.members = list(jobs), list(members)

        def gather(key: str, timeout_s: float) -> list[Any]:
            if key == "ready":
                return [{"free_bytes": 700, "gpu_free_bytes": None}]
            turn = self._turns.pop(0)
            if isinstance(turn, Exception):
                raise turn
            return [{"timed": turn}]

        def checked(rank: int, read: Any) -> Any:
            try:
                return read()
            except WireGarbled as error:
                raise RankFailed(rank, "label", str(error), "VerificationError") from error

        def stop() -> None:
            self.stopped += 1

        return SimpleNamespace(gather=gather, checked=checked, say=lambda word: None, stop=stop)


def pacer(fleet: Told, pace: Sequence[RankPace] = PACE, ranks: Sequence[Rank] = RANKS) -> Pacer:
    made = Pacer(cast(Fleet, fleet), ranks, pace, timeout_s=1.0, say=lambda text: None)
    made.start()
    return made


def test_programs_weigh_by_what_is_priced_by_them() -> None:
    assert pace_of([LONG, SHORT], [0.2, 0.1]) == 1.0
    assert pace_of([LONG, SHORT], [0.4, 0.1]) == pytest.approx((3 * 2 + 1) / 4)
    assert pace_of([LONG, SHORT], [None, 0.13]) == pytest.approx(1.3)
    assert pace_of([LONG, SHORT], [None, None]) is None


def test_a_round_has_the_mean_of_both_sides_of_it() -> None:
    assert between({"a": 1.0, "b": 2.0}, {"a": 1.2}) == pytest.approx({"a": 1.1})


def test_a_rank_is_timed_on_its_core_in_every_turn() -> None:
    fleet = Told([[0.26, 0.13], [0.2, None]])
    found = pacer(fleet)
    assert [found.take() for _ in "ab"] == [
        {RANKS[1].label: pytest.approx(1.3)}, {RANKS[1].label: pytest.approx(1.0)},
    ]  # fmt: skip
    assert fleet.members == [1]
    assert fleet.free_bytes == {"localhost": 700}
    (job,) = fleet.started
    # Cores are given out over all ranks of the host, of which this is the second.
    assert (job.kind, job.place, len(job.devices)) == ("pace", 1, 2)
    assert job.programs == (LONG, SHORT)
    found.stop()
    assert fleet.stopped == 1
    assert found.take() == {}
    assert found.notes == ()


@pytest.mark.parametrize(("in_pass", "issued"), [(True, False), (False, False), (False, True)])
def test_the_process_times_as_the_plan_says(in_pass: bool, issued: bool) -> None:
    fleet = Told([])
    pacer(fleet, [one.model_copy(update={"in_pass": in_pass, "issued": issued}) for one in PACE])
    assert [(job.in_pass, job.issued) for job in fleet.started] == [(in_pass, issued)]


def test_a_plan_without_programs_starts_nothing() -> None:
    fleet = Told([])
    found = pacer(fleet, [])
    assert found.take() == {}
    assert fleet.started == []


@pytest.mark.parametrize(
    "turn", [RankFailed(0, "h/cpu", "it exited", "VerificationError"), [0.1], ["x", "y"]]
)
def test_what_fails_is_noted_and_not_tried_again(turn: Any) -> None:
    fleet = Told([turn])
    found = pacer(fleet)
    assert [found.take() for _ in "ab"] == [{}, {}]
    assert "was not timed between the rounds" in found.notes[0]
    assert fleet.stopped == 1


@pytest.mark.parametrize("told", [None, [1.0], [1.0, -1.0], [1.0, float("nan")], [1.0, "1"]])
def test_times_that_are_none_are_refused(told: Any) -> None:
    with pytest.raises(WireGarbled):
        seconds_of({"timed": told}, 2)


# ------------------------------------------------------------------------------- a rank's process


class FakeWorker:
    """Times programs by a clock of its own, which runs ``slow`` times as long as the profile's."""

    slow: ClassVar[float] = 1.0
    made: ClassVar[list[tuple[str, tuple[int, ...]]]] = []

    def __init__(self, device: Any, *, cores: Sequence[int], memory_bytes: int | None) -> None:
        assert memory_bytes is not None
        FakeWorker.made.append((str(device), tuple(cores)))

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *raised: object) -> None:
        return

    def measure_pass(
        self, calls: Sequence[tuple[Program, int]], effort: Effort, *, keep: bool
    ) -> list[Measurement]:
        """Programs of 8 rows take 0.2 s a call, others fail."""
        assert keep
        assert {count for item, count in calls if item.dims["rows"] == 8} <= {3}
        return [
            Measurement((0.2,), 1, mean_s=0.2 * FakeWorker.slow, issue_s=0.3)
            if item.dims["rows"] == 8
            else Measurement.failed("no such kernel")
            for item, _ in calls
        ]

    def measure(self, item: Program, effort: Effort, *, keep: bool) -> Measurement:
        """As long by itself, and twice as long in no pass."""
        assert keep
        assert effort.min_s < 0.8, "a turn's time is shared by its programs"
        found = self.measure_pass([(item, 3)], effort, keep=keep)[0]
        return found if found.mean_s is None else replace(found, mean_s=2 * found.mean_s)


class FakeWire:
    """Says ``words`` and then hangs up."""

    def __init__(self, *words: dict[str, Any]) -> None:
        self.heard: list[dict[str, Any]] = []
        self._words = list(words)

    def send(self, message: dict[str, Any]) -> None:
        self.heard.append(message)

    def receive(self) -> dict[str, Any]:
        if not self._words:
            raise WireClosed("gone")
        return self._words.pop(0)


def job(*programs: PaceProgram, in_pass: bool = True, issued: bool = False) -> Job:
    names = tuple(rank.name for rank in RANKS)
    return Job(
        kind="pace", decision={}, mode="fast", devices=names, place=1, label="h/cpu, pace",
        timeout_s=1.0, programs=programs, in_pass=in_pass, issued=issued,
    )  # fmt: skip


@pytest.mark.skipif("len(__import__('os').sched_getaffinity(0)) < 2", reason="two ranks, two cores")
@pytest.mark.parametrize(("in_pass", "times"), [(True, 1), (False, 2)])
def test_a_slow_machine_is_told_by_what_failed_not(
    in_pass: bool, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace_process, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "slow", 1.31)
    wire = FakeWire({"time": 1}, {"exit": 1})
    keep_pace(cast(Wire, wire), job(LONG, SHORT, in_pass=in_pass))
    ready, answer = wire.heard
    assert ready["free_bytes"] > 0
    assert pace_of([LONG, SHORT], seconds_of(answer, 2)) == pytest.approx(1.31 * times)
    device, cores = FakeWorker.made[-1]
    assert device == "cpu:threads=1,isa=avx2"
    assert len(cores) == 1


@pytest.mark.skipif("len(__import__('os').sched_getaffinity(0)) < 2", reason="two ranks, two cores")
@pytest.mark.parametrize(("slow", "taken_s"), [(1.0, 0.3), (2.0, 0.4)])
def test_issued_calls_take_the_longer_of_device_and_host(
    slow: float, taken_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace_process, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "slow", slow)
    wire = FakeWire({"time": 1}, {"exit": 1})
    keep_pace(cast(Wire, wire), job(LONG, SHORT, issued=True))
    assert seconds_of(wire.heard[1], 2) == [pytest.approx(taken_s), None]


@pytest.mark.skipif("len(__import__('os').sched_getaffinity(0)) < 2", reason="two ranks, two cores")
def test_a_machine_that_runs_none_of_them_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace_process, "Worker", FakeWorker)
    with pytest.raises(MissingDataError, match="none of the programs"):
        keep_pace(cast(Wire, FakeWire()), job(SHORT))
