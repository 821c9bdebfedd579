"""`Rounds`: runs the candidates of a fleet, interleaved, and keeps what was measured.

All candidates are loaded side by side where memory allows it, else in *waves*. A wave runs one
warm-up round and then the timed rounds; a round runs every candidate once, and each round starts
with another one, so that a drift of the machine falls on all of them alike. Those that do not run
stand still. Between the rounds the machine itself is timed (`Pacer`). A candidate that fails is set
aside with the reason; the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from foreplan.cost_models.timeline import Timeline
from foreplan.errors import SpecError
from foreplan.planner.verify.answers import device_of, memory_of, record_of, result_of
from foreplan.planner.verify.candidates import Candidate
from foreplan.planner.verify.connections import ConnectionLost
from foreplan.planner.verify.group import Group, RankFailed
from foreplan.planner.verify.launch import Fleet
from foreplan.planner.verify.measured import measured_timeline
from foreplan.planner.verify.pacer import Pacer, between
from foreplan.planner.verify.peer_memory import BY_COPY
from foreplan.planner.verify.session import Job
from foreplan.planner.verify.verification import Device
from foreplan.planner.verify.wire import Message

#: Share of a host's free memory that candidates may fill together.
_SHARE = 0.8
#: What a process takes beside its ledger: libraries after the fork (CPU), a context (GPU).
_PROCESS_BYTES = {"cpu": 128 << 20, "cuda": 640 << 20}


@dataclass
class Measured:
    """What came of one candidate.

    Attributes:
        candidate: which.
        timelines: one a timed round.
        devices: what each rank's process said of itself.
        memory: each rank's bytes by item after the last round.
        held: what each rank's process took for the kernels.
        failure: why it could not be run, ``None`` if it could.
        results: what a last, untimed run computed, rank by rank; only of the first candidate.
        pace: of each timed round, the pace of every rank of the cluster that was timed, by label.
    """

    candidate: Candidate
    timelines: list[Timeline] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
    memory: list[dict[str, int]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    failure: RankFailed | SpecError | None = None
    results: list[dict[str, Any] | None] = field(default_factory=list)
    pace: list[dict[str, float]] = field(default_factory=list)


@dataclass
class _Loaded:
    measured: Measured
    group: Group
    away: tuple[int, ...]  # ranks with another clock
    timeout_s: float
    begun_s: float  # when its processes were started
    again: bool = False  # loaded a second time, and ready


class Rounds:
    """Runs candidates; see the module.

    Args:
        fleet: with a worker for every device of every candidate.
        backend: ``gloo`` or ``nccl``.
        host: the host that leads; ranks of others have other clocks.
        rounds: timed rounds.
        timeout_s: limit of one run; from the prediction if left out.
        load_timeout_s: limit of loading one candidate.
        say: hears what is going on.
        pacer: times the machine between the rounds.
    """

    def __init__(
        self,
        fleet: Fleet,
        backend: Literal["gloo", "nccl"],
        host: str,
        *,
        rounds: int,
        timeout_s: float | None,
        load_timeout_s: float,
        say: Callable[[str], None],
        pacer: Pacer | None = None,
    ) -> None:
        self._fleet = fleet
        self._backend: Literal["gloo", "nccl"] = backend
        self._host = host
        self._rounds = rounds
        self._timeout_s = timeout_s
        self._load_timeout_s = load_timeout_s
        self._say = say
        self._pacer = pacer

    def run(self, candidates: Sequence[Candidate], *, results: bool) -> list[Measured]:
        """Run every candidate in every round.

        Candidates that run alike are run once: what differed between them would be chance.

        Args:
            candidates: the chosen decision first.
            results: run the first once more afterwards, untimed, and keep what it computes.

        Raises:
            VerificationError: the chosen decision could not be run (or the class of its error).
        """
        keys = [candidate.run for candidate in candidates]
        unlike = dict(zip(reversed(keys), reversed(candidates), strict=True))
        found = {key: Measured(unlike[key]) for key in dict.fromkeys(keys)}
        for key, candidate in zip(keys, candidates, strict=True):
            if candidate is not unlike[key]:
                self._say(f"{candidate.name} runs as {unlike[key].name} does")
        measured = list(found.values())
        waves = self._waves([item.candidate for item in measured])
        for number, wave in enumerate(waves):
            if len(waves) > 1:
                self._say(f"memory holds {len(wave)} candidates at a time: wave {number + 1}")
            self._wave([measured[k] for k in wave], collect=results and number == 0)
        return [
            replace(found[key], candidate=candidate)
            for key, candidate in zip(keys, candidates, strict=True)
        ]

    def once(self, candidate: Candidate, mode: str) -> list[dict[str, Any] | None]:
        """Load a candidate, run it once, and return the results of its ranks.

        Raises:
            RankFailed: a rank could not do its part.
        """
        loaded = self._load(Measured(candidate), mode)
        try:
            _, answers = self._go(loaded, 0, result=True)
        finally:
            loaded.group.stop()
        return [result_of(answer) for answer in answers]

    def reference(self, candidate: Candidate, mode: str) -> dict[str, Any] | None:
        """What the planner's reference computes, in one process on the first rank's device.

        Raises:
            RankFailed: the process failed.
        """
        first = candidate.ranks[0]
        job = Job(
            kind="reference", decision=candidate.decision, mode=mode, devices=(first.name,),
            label=f"{first.label}, reference", timeout_s=self._load_timeout_s,
        )  # fmt: skip
        group = self._fleet.start([job], [first.index], self._load_timeout_s)
        try:
            found = group.gather("reference", self._load_timeout_s)[0]["reference"]
        finally:
            group.stop()
        return found if isinstance(found, dict) else None

    # -------------------------------------------------------------------------------------- waves

    def _waves(self, candidates: Sequence[Candidate]) -> list[list[int]]:
        """Candidates that fit into memory together, in order."""
        waves: list[list[int]] = []
        used: dict[str, float] = {}
        for k, candidate in enumerate(candidates):
            need: dict[str, float] = {}
            room: dict[str, float] = {}
            for rank, size, cap in zip(
                candidate.ranks, candidate.memory_bytes, candidate.capacities, strict=True
            ):
                gpu = rank.name.kind == "cuda"
                pool = rank.label if gpu else rank.host
                need[pool] = need.get(pool, 0.0) + size + _PROCESS_BYTES[rank.name.kind]
                free: float | None = self._fleet.free_bytes.get(pool if gpu else rank.host)
                # A GPU that does not say what is free holds at least what one rank may use.
                room[pool] = float(cap or "inf") if free is None and gpu else _SHARE * (free or 0)
            fits = all(used.get(pool, 0.0) + need[pool] <= room[pool] for pool in need)
            if not waves or not fits:
                waves.append([])
                used = {}
            waves[-1].append(k)
            for pool in need:
                used[pool] = used.get(pool, 0.0) + need[pool]
        return waves

    def _wave(self, wave: Sequence[Measured], *, collect: bool) -> None:
        running: list[_Loaded] = []
        try:
            for measured in wave:
                self._say(f"loading {measured.candidate.name}")
                try:
                    running.append(self._start(measured, "fast"))
                except RankFailed as failure:
                    self._set_aside(measured, failure)
            for stage in (self._connect, self._await_ready):
                for loaded in tuple(running):  # they load side by side
                    try:
                        if not loaded.again:
                            stage(loaded)
                    except RankFailed as failure:
                        place = running.index(loaded)
                        del running[place]
                        loaded.group.stop()
                        running[place:place] = self._once_more(loaded.measured, failure)
            for loaded in running:
                self._rest(loaded, True)
            before: dict[str, float] = {}
            for number in range(-1, self._rounds):
                self._say("warm-up" if number < 0 else f"round {number + 1} of {self._rounds}")
                turn = max(number, 0) % max(len(running), 1)
                for loaded in (*running[turn:], *running[:turn]):
                    try:
                        self._timed(loaded, number)
                    except RankFailed as failure:
                        self._set_aside(loaded.measured, failure)
                        loaded.group.stop()
                        running.remove(loaded)
                after = {} if self._pacer is None else self._pacer.take()
                if number >= 0:
                    for loaded in running:
                        loaded.measured.pace.append(between(before, after))
                before = after
            if collect and running and running[0].measured is wave[0]:
                _, answers = self._go(running[0], self._rounds, result=True)
                wave[0].results = [result_of(answer) for answer in answers]
        finally:
            for loaded in running:
                loaded.group.stop()

    def _once_more(self, measured: Measured, failure: RankFailed) -> list[_Loaded]:
        """Load a candidate anew whose ranks missed each other; nothing if that fails too.

        Where a rank is at fault it would fail again. Where none is, each has only lost the others:
        on a busy host a connection may come too late, and the rounds need not be lost for it.
        """
        if failure.error == ConnectionLost.__name__:
            self._say(f"{measured.candidate.name} failed: {failure}; loading it once more")
            try:
                return [replace(self._load(measured, "fast"), again=True)]
            except RankFailed as again:
                failure = again
        self._set_aside(measured, failure)
        return []

    def _set_aside(self, measured: Measured, failure: RankFailed) -> None:
        """Keep the reason; without the chosen decision there is nothing to verify."""
        if measured.candidate.role == "chosen":
            raise failure.as_own_error() from None
        self._say(f"{measured.candidate.name} failed: {failure}")
        measured.failure = failure

    def _load(self, measured: Measured, mode: str) -> _Loaded:
        loaded = self._start(measured, mode)
        try:
            self._connect(loaded)
            self._await_ready(loaded)
        except BaseException:
            loaded.group.stop()
            raise
        return loaded

    def _start(self, measured: Measured, mode: str) -> _Loaded:
        """Start a candidate's processes, which then load by themselves."""
        candidate = measured.candidate
        timeout_s = self._timeout_s
        if timeout_s is None:
            predicted = candidate.predicted.total_s if candidate.predicted else 1.0
            timeout_s = max(60.0, 30.0 * predicted)
        begun_s = time.monotonic()
        group = self._fleet.start(
            candidate.jobs(self._backend, mode, timeout_s),
            [rank.index for rank in candidate.ranks], self._load_timeout_s,
        )  # fmt: skip
        away = tuple(i for i, r in enumerate(candidate.ranks) if r.host != self._host)
        return _Loaded(measured, group, away, timeout_s, begun_s)

    def _connect(self, loaded: _Loaded) -> None:
        """Give a candidate the GPUs until its ranks are connected.

        Contexts and communicators are made under locks of the driver: of many candidates at once
        each would wait for all, and a rank's watchdog knows of its own alone.
        """
        if self._backend == "nccl":
            loaded.group.gather("prepared", self._load_timeout_s)
            loaded.group.say({"turn": 1})
            loaded.group.gather("connected", self._load_timeout_s)

    def _await_ready(self, loaded: _Loaded) -> None:
        group, ranks = loaded.group, loaded.measured.candidate.ranks
        answers = group.gather("ready", self._load_timeout_s)
        took_s = time.monotonic() - loaded.begun_s
        self._say(f"{loaded.measured.candidate.name} is ready after {took_s:.1f} s")
        loaded.measured.devices = [
            group.checked(i, partial(device_of, answer, rank.label))
            for i, (answer, rank) in enumerate(zip(answers, ranks, strict=True))
        ]

    def _timed(self, loaded: _Loaded, number: int) -> None:
        timeline, answers = self._go(loaded, number, result=False)
        if number >= 0:
            loaded.measured.timelines.append(timeline)
        found = [
            loaded.group.checked(i, partial(memory_of, answer)) for i, answer in enumerate(answers)
        ]
        loaded.measured.memory = [items for items, _ in found]
        loaded.measured.held = [held for _, held in found]

    def _rest(self, loaded: _Loaded, resting: bool) -> None:
        """Let a candidate stand still between its runs; over NCCL watchdogs would miss time."""
        if self._backend == "gloo":
            loaded.group.rest(resting)

    def _go(self, loaded: _Loaded, number: int, *, result: bool) -> tuple[Timeline, list[Message]]:
        group = loaded.group
        self._rest(loaded, False)
        offsets = group.offsets_ns(loaded.away)
        group.say({"run": number, "result": result})
        answers = group.gather("ran", loaded.timeout_s + 5.0)
        self._rest(loaded, True)
        schedule = loaded.measured.candidate.schedule
        records = []
        for rank, answer in enumerate(answers):
            steps = len(schedule.of_rank(rank))
            records.append(group.checked(rank, partial(record_of, answer, steps)))
            group.checked(rank, partial(result_of, answer))
        shifts = [offsets.get(rank, 0) for rank in range(len(records))]
        copies = all(device.messages == BY_COPY for device in loaded.measured.devices)
        timeline = measured_timeline(schedule, records, shifts, sent_by_copy=copies)
        return timeline, answers
