"""`ShardJournal`: what a run of `measure` has finished, on the disk, so that a killed run goes on.

Records lie in shards, names of finished jobs in ``jobs.txt`` beside them. A job is noted after its
records are written: a crash costs at most what was in memory, and nothing is noted that is lost.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from foreplan.datasets.storage import write_atomically
from foreplan.datasets.tir.records import ProgramRecord, read_records, write_records
from foreplan.datasets.tir.target import TargetDevice
from foreplan.errors import SpecError

#: Records kept in memory at most, and for how long: what a crash of this process can cost. A shard
#: for each record would be slow to merge. Convention.
_SHARD_ROWS = 400
_SHARD_S = 60.0


class ShardJournal:
    """Records and finished jobs of one folder; may be called from several threads.

    Args:
        folder: of the dataset; shards go to ``folder/shards``.
        device: whose programs of earlier runs count as timed.

    Attributes:
        shards: folder of the shards.
        done: names of the jobs that earlier runs have finished.
        timed: keys of the programs that earlier runs have timed on the very device.

    Raises:
        SpecError: a folder that cannot be made, or a damaged shard.
    """

    def __init__(self, folder: Path, device: TargetDevice) -> None:
        self.shards = folder / "shards"
        try:
            self.shards.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecError(str(folder), got=error.strerror, expected="a folder to make") from error
        self._jobs = self.shards / "jobs.txt"
        self._lock = threading.Lock()
        self._records: list[ProgramRecord] = []
        self._finished: list[str] = []
        self._flushed_at = time.monotonic()
        self._counts: dict[str, int] = {}
        self._known: dict[str, set[str]] = {}
        self.done = self._read_jobs()
        timed = set()
        if any(self.shards.glob("*.parquet")):
            for record in read_records(self.shards):
                self._known.setdefault(record.task_key, set()).add(record.program_key)
                if (record.chip, record.target) == (device.chip, device.target):
                    timed.add(record.program_key)
        self.timed = frozenset(timed)

    def _read_jobs(self) -> frozenset[str]:
        if not self._jobs.exists():
            return frozenset()
        text = self._jobs.read_text(encoding="utf-8", errors="replace")
        whole, _, torn = text.rpartition("\n")  # a process can die while it writes a line
        if torn:
            write_atomically(self._jobs, whole + "\n" if whole else "")
        return frozenset(whole.split("\n"))

    def known(self, task_key: str) -> list[str]:
        """Keys of the programs of a task that were kept, in order."""
        with self._lock:
            return sorted(self._known.get(task_key, ()))

    def counts(self) -> Mapping[str, int]:
        """How many records this run has kept, by status, in order."""
        with self._lock:
            return dict(sorted(self._counts.items()))

    def keep(self, record: ProgramRecord) -> None:
        """Keep a record; written by the next `flush`."""
        with self._lock:
            self._records.append(record)
            self._counts[record.status] = self._counts.get(record.status, 0) + 1
            if record.program_key:
                self._known.setdefault(record.task_key, set()).add(record.program_key)

    def finish(self, job: str) -> None:
        """Note a job all of whose records were kept; writes them where they are many or old.

        Raises:
            SpecError: as `flush`.
        """
        with self._lock:
            self._finished.append(job)
            old = time.monotonic() - self._flushed_at > _SHARD_S
            full = len(self._records) >= _SHARD_ROWS
        if old or full:
            self.flush()

    def flush(self) -> None:
        """Write the records that were kept, then the names of the jobs that are finished.

        Raises:
            SpecError: the folder cannot be written.
        """
        with self._lock:
            records, self._records = self._records, []
            finished, self._finished = self._finished, []
            self._flushed_at = time.monotonic()
        if records:
            write_records(records, self.shards / f"shard-{time.time_ns()}.parquet")
        if finished:
            try:
                with self._jobs.open("a", encoding="utf-8") as stream:
                    stream.write("".join(f"{name}\n" for name in finished))
                    stream.flush()
                    os.fsync(stream.fileno())
            except OSError as error:
                raise SpecError(
                    str(self._jobs), got=error.strerror, expected="a disk with room"
                ) from error
