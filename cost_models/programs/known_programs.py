"""`KnownPrograms`: how long programs took on devices of training, for devices like those.

What one board has timed says more of a program's time on another board of the chip than its text
does: an H200's times are 6.7 % off an H100's, predictions 13.8 % (docs/results/programs.md).
Programs are the same if their leaves are equal.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.programs.program_table import Floats, ProgramTable

#: Measured rows with a copy, and tasks of them, from which a device's copies are trusted.
#: Conventions.
_LEAST_ROWS, _LEAST_TASKS = 20, 5
#: Shares of a copy that are tried, and the part of the error without one that the best has to be
#: within: of a Xeon's 23 tasks an EPYC's copies seemed a little better, and were not.
_SHARES, _BETTER = (0.0, 0.25, 0.5, 0.75, 1.0), 0.95


class Copy(NamedTuple):
    """How programs of a device are copied from another one.

    Attributes:
        source: name of the device that timed them.
        factor: added to the logarithm of its times.
        share: of the copy in the mean of logarithms of copy and prediction.
    """

    source: str
    factor: float
    share: float


@dataclass(frozen=True)
class KnownPrograms:
    """Seconds of K programs.

    Attributes:
        digest: of the program's leaves (K), ascending within each device.
        device: number of the device in ``devices`` (K).
        latency_s: seconds (K).
        devices: names.
    """

    digest: NDArray[np.uint64]
    device: NDArray[np.int16]
    latency_s: NDArray[np.float32]
    devices: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.digest)

    @classmethod
    def of(cls, table: ProgramTable, seconds: Floats) -> Self:
        """Programs of a table that took so many seconds (N); of equal ones the median."""
        times: dict[tuple[int, int], list[float]] = defaultdict(list)
        used, device = np.unique(table.device, return_inverse=True)
        for number, digest, value in zip(device, digests(table), seconds, strict=True):
            times[int(number), int(digest)].append(float(value))
        keys = sorted(times)
        return cls(
            np.array([digest for _, digest in keys], dtype=np.uint64),
            np.array([number for number, _ in keys], dtype=np.int16),
            np.array([np.median(times[key]) for key in keys], dtype=np.float32),
            tuple(table.devices[number].name for number in used.tolist()),
        )

    def seconds(self, asked: NDArray[np.uint64], device: str) -> Floats:
        """Seconds of programs (N) on a device, NaN where it has not timed them.

        Args:
            asked: from `digests`.
            device: name of it.
        """
        found = np.full(len(asked), np.nan)
        if device not in self.devices:
            return found
        own = self.device == self.devices.index(device)
        digest, latency = self.digest[own], self.latency_s[own]
        if not len(digest):
            return found
        at = np.minimum(np.searchsorted(digest, asked), len(digest) - 1)
        same = digest[at] == asked
        found[same] = latency[at[same]]
        return found

    def arrays(self) -> dict[str, NDArray[Any]]:
        """As files keep it; the names of devices apart."""
        return {"digest": self.digest, "device": self.device, "latency_s": self.latency_s}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], devices: Sequence[str]) -> Self:
        """What `arrays` gave; none of a file from before there were known programs.

        Raises:
            ValueError: arrays of unequal length, devices that are not named, or no seconds.
        """
        found = cls(
            arrays.get("digest", np.zeros(0, np.uint64)),
            arrays.get("device", np.zeros(0, np.int16)),
            arrays.get("latency_s", np.zeros(0, np.float32)),
            tuple(devices),
        )
        if not len(found.digest) == len(found.device) == len(found.latency_s):
            raise ValueError("known programs: arrays of unequal length")
        if not set(np.unique(found.device).tolist()) <= set(range(len(devices))):
            raise ValueError(f"known programs of devices other than the {len(devices)} named")
        if not np.all(found.latency_s > 0):
            raise ValueError("known programs of no time")
        return found

    def copy_for(
        self, table: ProgramTable, predicted_s: Floats, sources: Sequence[str]
    ) -> Copy | None:
        """How the programs of a device are best copied, by some that it has timed.

        The share is the one with the least mean error on them, of a copy and a prediction that are
        both rid of what all their rows have in common; the source the one that gains the most.

        Args:
            table: programs of one device, with labels (N).
            predicted_s: what they were predicted to take before (N).
            sources: names of devices that may be copied.

        Returns:
            None where too few were timed elsewhere, or a copy is no better.
        """
        asked, gained, best = digests(table), 0.0, None
        for source in sources:
            copied = self.seconds(asked, source)
            both = np.isfinite(copied)
            if both.sum() < _LEAST_ROWS or len(set(table.task[both].tolist())) < _LEAST_TASKS:
                continue
            ahead = np.log(table.latency_s[both] / copied[both])
            left = np.log(table.latency_s[both] / predicted_s[both])
            factor = float(np.median(ahead))
            errors = {
                share: float(np.abs(np.expm1(-rest)).mean())
                for share in _SHARES
                for rest in [share * (ahead - factor) + (1 - share) * (left - np.median(left))]
            }
            share = min(_SHARES, key=lambda share: errors[share])
            gain = float(both.sum()) * (errors[0.0] - errors[share])
            if errors[share] < _BETTER * errors[0.0] and gain > gained:
                gained, best = gain, Copy(source, factor, share)
        return best


def digests(table: ProgramTable) -> NDArray[np.uint64]:
    """A number for each program's leaves (N), in half precision: last bits do not count."""
    halves = np.ascontiguousarray(np.clip(table.leaves, -6e4, 6e4).astype(np.float16))
    raw, width = halves.tobytes(), halves.shape[1] * 2
    ends = (table.offsets * width).tolist()
    return np.array(
        [
            int.from_bytes(hashlib.blake2b(raw[start:end], digest_size=8).digest(), "little")
            for start, end in itertools.pairwise(ends)
        ],
        dtype=np.uint64,
    )
