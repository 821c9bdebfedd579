"""`Group`: the processes of one candidate decision, as the leader sees them."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from foreplan import errors
from foreplan.errors import ForeplanError, SpecError, VerificationError
from foreplan.planner.verify.answers import whole
from foreplan.planner.verify.session import Job
from foreplan.planner.verify.wire import Message, Wire, WireClosed, WireGarbled

if TYPE_CHECKING:
    from foreplan.planner.verify.launch import Fleet

#: How long to wait for the process that knows why, after another has lost its connection.
_GRACE_S = 2.0
_PINGS = 16
_T = TypeVar("_T")


class RankFailed(VerificationError):
    """A rank of a candidate could not do its part.

    Args:
        rank: its rank.
        label: its device in the cluster.
        reason: what happened.
        error: class of the error in its process.
    """

    def __init__(self, rank: int, label: str, reason: str, error: str) -> None:
        self.rank = rank
        self.label = label
        self.reason = reason
        self.error = error
        super().__init__(f"rank {rank} ({label}): {reason}")

    def as_own_error(self) -> ForeplanError:
        """The same as the class that the rank's process raised, where that is one of ours."""
        if self.error == "SpecError" and not self.reason.startswith("at "):
            return _Told(str(self))
        if self.error in ("InfeasibleError", "MissingDataError"):
            made: ForeplanError = getattr(errors, self.error)(str(self))
            return made
        return self


class _Told(SpecError):
    """A `SpecError` of another process, whose text is complete."""

    def __init__(self, text: str) -> None:
        ForeplanError.__init__(self, text)


class Peer:
    """One rank's process of a group, as the leader sees it."""

    def __init__(self, job: Job, member: int) -> None:
        self.job = job
        self.member = member
        self.wire: Wire | None = None
        self.inbox: deque[Message] = deque()
        self.lost_at: float | None = None
        self.how = ""
        #: All it said has been heard. How it ended may be told before, by the worker that saw it.
        self.closed = False


class Group:
    """The processes of one candidate decision; made by `Fleet.start`."""

    def __init__(self, fleet: Fleet, number: int, jobs: Sequence[Job], members: Sequence[int]):
        self._fleet = fleet
        self.number = number
        self._trouble_since: float | None = None
        self.peers = [Peer(job, member) for job, member in zip(jobs, members, strict=True)]

    def say(self, message: Message, *, to: int | None = None) -> None:
        """Tell all ranks something, or one."""
        for rank, peer in enumerate(self.peers):
            if to in (None, rank) and peer.wire is not None:
                with contextlib.suppress(WireClosed):  # `gather` finds out why
                    peer.wire.send(message)

    def gather(
        self, key: str, timeout_s: float, ranks: Collection[int] | None = None
    ) -> list[Message]:
        """Wait until every rank has sent a message with ``key``.

        Args:
            key: field that the message has.
            timeout_s: for all of them.
            ranks: only these.

        Raises:
            RankFailed: a rank failed, died or said nothing in time.
        """
        wanted = range(len(self.peers)) if ranks is None else sorted(ranks)
        deadline = time.monotonic() + timeout_s
        answers: dict[int, Message] = {}
        while True:
            for rank in wanted:
                peer = self.peers[rank]
                if rank not in answers and peer.inbox and key in peer.inbox[0]:
                    answers[rank] = peer.inbox.popleft()
            if len(answers) == len(wanted):  # who ends after its answer is no trouble
                return [answers[rank] for rank in wanted]
            self._fail_on_trouble()
            if time.monotonic() > deadline:
                rank = next(rank for rank in wanted if rank not in answers)
                peer = self.peers[rank]
                raise RankFailed(
                    rank, peer.job.label, f"no answer for {timeout_s:.0f} s", "VerificationError"
                )
            self._fleet.pump(min(0.2, max(deadline - time.monotonic(), 0.001)))

    def whole(self, key: str, timeout_s: float, rank: int) -> int:
        """The number that one rank sends as ``key``.

        Raises:
            RankFailed: as `gather`, or it sends something else.
        """
        answer = self.gather(key, timeout_s, [rank])[0]
        return self.checked(rank, partial(whole, answer, key))

    def checked(self, rank: int, read: Callable[[], _T]) -> _T:
        """What ``read`` makes of a rank's answer.

        Raises:
            RankFailed: the answer is not what a rank of this version says.
        """
        try:
            return read()
        except WireGarbled as error:
            label = self.peers[rank].job.label
            raise RankFailed(rank, label, f"it sent {error}", "VerificationError") from error

    def offsets_ns(self, ranks: Collection[int]) -> dict[int, int]:
        """What to add to the clocks of ranks to get this process's clock.

        Each answer lies between question and receipt; of several rounds the shortest counts, so
        the error is at most half of that round trip.
        """
        found: dict[int, int] = {}
        for rank in ranks:
            best: tuple[int, int] | None = None
            for _ in range(_PINGS):
                asked = time.monotonic_ns()
                self.say({"clock": 1}, to=rank)
                told = self.whole("clock", 10.0, rank)
                heard = time.monotonic_ns()
                trip = heard - asked
                if best is None or trip < best[0]:
                    best = trip, (asked + heard) // 2 - told
            found[rank] = best[1] if best is not None else 0
        return found

    def stop(self) -> None:
        """End the processes and forget the group."""
        self._fleet.stop(self)

    def rest(self, resting: bool) -> None:
        """Stop the processes, which have nothing to do until the next run, or let them go on.

        gloo's threads wake a hundred times a second for nothing, several in each process, and take
        time from the decision that runs on the same cores (docs/results/precision.md).
        """
        self._fleet.rest(self, resting)

    def _fail_on_trouble(self) -> None:
        """Raise for the rank that is at fault, not for one that only lost its connection to it."""
        blamed: tuple[int, RankFailed] | None = None
        waiting = False
        for rank, peer in enumerate(self.peers):
            told = next((word for word in peer.inbox if "failed" in word), None)
            if told is not None:
                failure = RankFailed(
                    rank, peer.job.label, str(told["failed"]), str(told.get("error"))
                )
                weight = 2 if told.get("peer") else 0
            elif peer.lost_at is not None:
                unheard = not peer.how or (peer.wire is not None and not peer.closed)
                waiting = waiting or (unheard and time.monotonic() < peer.lost_at + _GRACE_S)
                tail = self._fleet.local.tail(peer.member)
                why = peer.how or "its process vanished"
                why += f"; it said last: {tail}" if tail else ""
                failure = RankFailed(rank, peer.job.label, why, "VerificationError")
                weight = 1
            else:
                continue
            if blamed is None or weight < blamed[0]:
                blamed = weight, failure
        if blamed is None:
            return
        if blamed[0] == 2 and self._patience():
            return
        if blamed[0] == 1 and waiting:
            return
        raise blamed[1]

    def _patience(self) -> bool:
        """Whether to wait a moment longer for the rank that knows why there is trouble."""
        if self._trouble_since is None:
            self._trouble_since = time.monotonic()
        return time.monotonic() < self._trouble_since + _GRACE_S
