"""measure: tasks become measured programs: a pool of processes builds, one process a device times.

A program that faults or hangs takes its process with it and is recorded as such; the process is
replaced. What is finished is kept (`ShardJournal`): a run that was killed goes on where it was,
because jobs are numbered and draws are numbered.
"""

from __future__ import annotations

import contextlib
import math
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from foreplan.datasets.timing.child_process import ChildEnded
from foreplan.datasets.tir.records import ProgramRecord, merge_shards
from foreplan.datasets.tir.sample import Sample
from foreplan.datasets.tir.shard_journal import ShardJournal
from foreplan.datasets.tir.site import ProgramWorker, Site
from foreplan.datasets.tir.target import TargetDevice
from foreplan.datasets.tir.task import Task, program_key
from foreplan.datasets.tir.toolchain import Toolchain, require_tvm
from foreplan.errors import MissingDataError

#: How often the caller is told how far it is. Convention.
_TELL_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """How much is measured, by how many processes, for how long.

    Attributes:
        samples: programs of a task in one round.
        rounds: rounds over all tasks; each draws other programs.
        builders: processes that build; of each machine, where there are several.
        minutes: no job is begun later than this; ``None`` for no limit.
        slow_s: a program that takes longer is run once.
        build_timeout_s: longest time for one task's builds of a round. LLVM can take minutes for
            one program; then each of the round is tried alone, for a third of the time.
        time_timeout_s: longest time for one program's timing.
        timer_core: core of the timing process (CPU only); the last one by default.
        compiler: C++ compiler that links what is built, for boards of another architecture.
    """

    samples: int = 8
    rounds: int = 1
    builders: int = 1
    minutes: float | None = None
    slow_s: float = 1.0
    build_timeout_s: float = 60.0
    time_timeout_s: float = 60.0
    timer_core: int | None = None
    compiler: str | None = None


@dataclass(slots=True)
class _Job:
    task: Task
    round: int
    only: int | None = None
    recorded: tuple[Sample, ...] = ()
    library: str = ""
    reply: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        which = str(self.round)
        if self.recorded:  # cut anew when a run goes on
            which = f"{program_key(self.recorded[0].module)}+{len(self.recorded)}"
        return f"{self.task.key}/{which}" + ("" if self.only is None else f"/{self.only}")


def measure(
    tasks: Sequence[Task],
    site: Site,
    folder: Path,
    options: MeasureOptions,
    *,
    recorded: Mapping[str, Sequence[Sample]] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Build and time programs of tasks; keep them in ``folder``.

    Args:
        tasks: what to sample from.
        site: where to build and time, entered already: `LocalSite`, `RaySite` or `RpcSite`.
        folder: shards go to ``folder/shards``, merged files to ``folder``.
        options: amounts and limits.
        recorded: by keys of tasks, programs to build in place of draws (`recorded_programs`), each
            once whatever the rounds.
        progress: called with a line for people, now and then.

    Returns:
        Document as of `merge_shards`.

    Raises:
        MissingDataError: no TVM, or a machine of the site was lost; run again, it goes on.
        SpecError: TVM of another version, or a folder that cannot be written.
    """
    toolchain = require_tvm()
    journal = ShardJournal(folder, site.devices[0])
    _Run(tasks, site, journal, options, recorded, toolchain).work(progress)
    if options.minutes is not None and not any(journal.shards.glob("*.parquet")):
        raise MissingDataError(
            f"no program was timed within {options.minutes:g} minutes",
            fix="the same foreplan dataset build with more --minutes",
        )
    return merge_shards(journal.shards, folder)


class _Run:
    def __init__(
        self,
        tasks: Sequence[Task],
        site: Site,
        journal: ShardJournal,
        options: MeasureOptions,
        recorded: Mapping[str, Sequence[Sample]] | None,
        toolchain: Toolchain,
    ) -> None:
        self._site, self._options, self._toolchain = site, options, toolchain
        self._devices = tuple(site.devices)
        self._journal = journal
        self._lock = threading.Lock()  # of the jobs that are left
        self._built: queue.Queue[_Job | None] = queue.Queue(maxsize=4 * len(self._devices))
        limit = math.inf if options.minutes is None else 60.0 * options.minutes
        self._deadline = time.monotonic() + limit
        self._error: BaseException | None = None
        self._jobs = self._plan(tasks, recorded)

    def _plan(
        self, tasks: Sequence[Task], recorded: Mapping[str, Sequence[Sample]] | None
    ) -> Iterator[_Job]:
        timed = self._journal.timed
        if recorded is None:
            rounds = range(self._options.rounds)
            jobs = [_Job(task, number) for number in rounds for task in tasks]
        else:
            size, jobs = self._options.samples, []
            for task in tasks:
                left = [one for one in recorded[task.key] if program_key(one.module) not in timed]
                jobs += [
                    _Job(task, start // size, recorded=tuple(left[start : start + size]))
                    for start in range(0, len(left), size)
                ]
        return iter([job for job in jobs if job.name not in self._journal.done])

    def work(self, progress: Callable[[str], None]) -> None:
        """Run every job, until they end or time does."""
        with tempfile.TemporaryDirectory(prefix="foreplan-") as scratch:
            builders = [
                threading.Thread(target=self._guard, args=(self._build_all, n, Path(scratch)))
                for n in range(self._site.builders)
            ]
            timers = [
                threading.Thread(target=self._guard, args=(self._time_all, n))
                for n in range(len(self._devices))
            ]
            for thread in (*builders, *timers):
                thread.start()
            try:
                while any(thread.is_alive() for thread in builders):
                    for thread in builders:
                        thread.join(timeout=_TELL_EVERY_S / len(builders))
                    progress(self._line())
                for _ in timers:
                    self._put(None)
                for thread in timers:
                    thread.join()
                progress(self._line())
            except BaseException as stopped:  # an interrupt: threads would go on without end
                self._error, self._deadline = self._error or stopped, 0.0
                for thread in (*builders, *timers):
                    thread.join()
        self._journal.flush()
        if self._error is not None:
            raise self._error

    def _guard(self, work: Callable[..., None], *arguments: Any) -> None:
        """Hand an error in a thread to the caller, and let the other threads end."""
        try:
            work(*arguments)
        except BaseException as error:
            self._error = self._error or error
            self._deadline = 0.0

    def _put(self, job: _Job | None) -> None:
        while True:
            try:
                return self._built.put(job, timeout=1.0)
            except queue.Full:
                if self._error is not None:
                    return

    def _take(self) -> _Job | None:
        """The next job that was built; None when there is none left, or another thread failed."""
        while True:
            try:
                return self._built.get(timeout=1.0)
            except queue.Empty:
                if self._error is not None:
                    return None

    def _build_all(self, number: int, scratch: Path) -> None:
        count = 0
        worker = self._site.builder(number)
        with contextlib.closing(worker):
            while time.monotonic() < self._deadline:
                with self._lock:
                    job = next(self._jobs, None)
                if job is None:
                    return
                known = self._journal.known(job.task.key)
                job.library = str(scratch / f"{number}-{count}.so")
                count += 1
                self._build(worker, job, known)
                most = len(job.recorded) or self._options.samples
                alone = 0 if job.reply.get("status") != "timeout" else most
                self._put(job)
                for only in range(alone):
                    single = _Job(
                        job.task, job.round, only, job.recorded, f"{job.library[:-3]}-{only}.so"
                    )
                    self._build(worker, single, known)
                    self._put(single)

    def _build(self, worker: ProgramWorker, job: _Job, known: list[str]) -> None:
        request = {
            "do": "build",
            "module": job.task.module,
            "device": asdict(self._devices[0]),
            "count": self._options.samples if job.only is None else job.only + 1,
            "only": job.only,
            "start": 10_000 * job.round,
            "known": known,
            "recorded": [asdict(sample) for sample in job.recorded],
            "library": job.library,
            "compiler": self._options.compiler,
        }
        # A job begun just before the end gets half a minute, so that the whole run ends in time.
        left = self._deadline + 30.0 - time.monotonic()
        limit = self._options.build_timeout_s / (1 if job.only is None else 3)
        try:
            job.reply = worker.ask(request, min(limit, max(1.0, left)))
        except ChildEnded as lost:
            job.reply = {"error": str(lost), "status": lost.status}

    def _time_all(self, number: int) -> None:
        device, worker = self._devices[number], self._site.timer(number)
        with contextlib.closing(worker):
            while (job := self._take()) is not None:
                programs = job.reply.get("programs", [])
                late = False
                for program in programs:
                    late = time.monotonic() > self._deadline + 45.0
                    if late:
                        break
                    self._journal.keep(self._timed(worker, device, job, program))
                if not programs:
                    self._journal.keep(self._failed(device, job))
                Path(job.library).unlink(missing_ok=True)
                if not late:
                    self._journal.finish(job.name)

    def _timed(
        self, worker: ProgramWorker, device: TargetDevice, job: _Job, program: Mapping[str, Any]
    ) -> ProgramRecord:
        if "error" in program:
            return self._record(device, job, program, status="build_failed", error=program["error"])
        request = {
            "do": "time",
            "library": job.library,
            "key": program["key"],
            "arguments": job.reply["arguments"],
            "kind": device.kind,
            "slow_s": self._options.slow_s,
        }
        try:
            reply = worker.ask(request, self._options.time_timeout_s)
        except ChildEnded as lost:
            return self._record(device, job, program, status=lost.status, error=str(lost))
        if "error" in reply:
            # A CUDA fault comes as an error first and poisons every later call.
            worker.close()
            return self._record(device, job, program, status="run_failed", error=reply["error"])
        return self._record(device, job, program, status="slow" if reply["slow"] else "ok", **reply)

    def _failed(self, device: TargetDevice, job: _Job) -> ProgramRecord:
        nothing = {"key": "", "seed": -1, "module": "", "trace": ""}
        reason = job.reply.get("error", "no new valid program was drawn")
        status = job.reply.get("status", "build_failed" if "error" in job.reply else "no_sample")
        return self._record(device, job, nothing, status=status, error=reason)

    def _record(
        self,
        device: TargetDevice,
        job: _Job,
        program: Mapping[str, Any],
        *,
        status: str,
        error: str = "",
        times_s: Sequence[float] = (),
        calls: int = 0,
        slow: bool = False,
        clock_hz: float | None = None,
        load: float | None = None,
    ) -> ProgramRecord:
        median = statistics.median(times_s) if times_s else math.nan
        least, most = min(times_s, default=math.nan), max(times_s, default=math.nan)
        return ProgramRecord(
            task_key=job.task.key,
            task_name=job.task.name,
            program_key=program["key"],
            networks=tuple(job.task.calls),
            calls=tuple(job.task.calls.values()),
            families=tuple(sorted(job.task.families)),
            device=device.name if device.kind == "llvm" else "cuda:0",  # which of equals: no matter
            chip=device.chip,
            target=device.target,
            seed=program["seed"],
            module=program["module"],
            trace=program["trace"],
            status=status,
            error=error,
            median_s=median,
            min_s=least,
            max_s=most,
            spread=(most - least) / median if median > 0 else math.nan,
            repetitions=len(times_s),
            calls_per_repetition=calls,
            load=math.nan if load is None else load,
            clock_hz=math.nan if clock_hz is None else clock_hz,
            tvm=self._toolchain.tvm,
            ffi=self._toolchain.ffi,
            measured_at=time.time(),
        )

    def _line(self) -> str:
        counts = self._journal.counts()
        said = ", ".join(f"{count} {status}" for status, count in counts.items())
        return f"programs: {said or 'none yet'}"
