"""`Pacer`: how fast the machine runs while a plan is verified, told by programs of its profiles.

On every rank a process of its own times a few programs of the device's profile (`keep_pace`). All
ranks time at once, between the rounds, while no candidate runs. What fails leaves the verification
as it would be without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from foreplan.datasets.cluster_entry import Rank
from foreplan.planner.pace import PaceProgram, RankPace
from foreplan.planner.verify.answers import seconds_of
from foreplan.planner.verify.group import Group, RankFailed
from foreplan.planner.verify.session import Job

if TYPE_CHECKING:
    from foreplan.planner.verify.launch import Fleet


class Pacer:
    """The leader's side.

    Args:
        fleet: with a worker for every rank.
        ranks: of the chosen decision; those without programs are not timed.
        pace: what to time, from the plan.
        timeout_s: for starting, and for one turn.
        say: hears what is going on.

    Attributes:
        notes: why there is no pace, though the plan has programs; else empty.
    """

    def __init__(
        self,
        fleet: Fleet,
        ranks: Sequence[Rank],
        pace: Sequence[RankPace],
        *,
        timeout_s: float,
        say: Callable[[str], None],
    ) -> None:
        known = {one.device: one for one in pace if one.programs}
        self._fleet, self._timeout_s, self._say = fleet, timeout_s, say
        self._ranks = [rank for rank in ranks if rank.label in known]
        self._pace = [known[rank.label] for rank in self._ranks]
        self._programs = [one.programs for one in self._pace]
        self._everyone = tuple(ranks)
        self._group: Group | None = None
        self.notes: tuple[str, ...] = ()

    def start(self) -> None:
        """Start the processes, and wait until they hold their inputs."""
        if not self._ranks:
            return
        self._say("starting what times the machine")
        try:
            self._group = self._fleet.start(
                self._jobs(), [rank.index for rank in self._ranks], self._timeout_s
            )
            answers = self._group.gather("ready", self._timeout_s)
        except RankFailed as failure:
            self._give_up(failure)
            return
        for rank, answer in zip(self._ranks, answers, strict=True):
            # What candidates find free is what is left now.
            for pool, told in ((rank.host, "free_bytes"), (rank.label, "gpu_free_bytes")):
                if isinstance(answer.get(told), int) and pool in self._fleet.free_bytes:
                    self._fleet.free_bytes[pool] = min(self._fleet.free_bytes[pool], answer[told])

    def take(self) -> dict[str, float]:
        """Time all programs once.

        Returns:
            Each rank's pace by its label: time now over the expected, programs weighed by what is
            priced by them. Ranks of which nothing could be timed are left out.
        """
        group = self._group
        if group is None:
            return {}
        try:
            group.say({"time": 1})
            answers = group.gather("timed", self._timeout_s)
            times = [
                group.checked(k, partial(seconds_of, answer, len(self._programs[k])))
                for k, answer in enumerate(answers)
            ]
        except RankFailed as failure:
            self._give_up(failure)
            return {}
        found = {}
        for rank, programs, seconds in zip(self._ranks, self._programs, times, strict=True):
            ratio = pace_of(programs, seconds)
            if ratio is not None:
                found[rank.label] = ratio
        return found

    def stop(self) -> None:
        """End the processes."""
        if self._group is not None:
            self._group.stop()
        self._group = None

    def _jobs(self) -> list[Job]:
        jobs = []
        for rank, one in zip(self._ranks, self._pace, strict=True):
            # The devices of all ranks of the host, so that cores are those of the run.
            beside = [other for other in self._everyone if other.host == rank.host]
            jobs.append(
                Job(
                    kind="pace", decision={}, mode="fast", devices=tuple(o.name for o in beside),
                    place=beside.index(rank), label=f"{rank.label}, pace", programs=one.programs,
                    in_pass=one.in_pass, issued=one.issued, timeout_s=self._timeout_s,
                )
            )  # fmt: skip
        return jobs

    def _give_up(self, failure: RankFailed) -> None:
        self.notes = (f"the machine was not timed between the rounds: {failure}",)
        self._say(self.notes[0])
        self.stop()


def pace_of(programs: Sequence[PaceProgram], seconds: Sequence[float | None]) -> float | None:
    """Time of programs over what they were expected to take, weighed by what is priced by them.

    Args:
        programs: what was timed.
        seconds: of each, ``None`` of what failed.
    """
    timed = [(p, s) for p, s in zip(programs, seconds, strict=True) if s is not None]
    total = math.fsum(p.priced_s for p, _ in timed)
    if not timed:
        return None
    return math.fsum(p.priced_s * s / p.expected_s for p, s in timed) / total


def between(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Pace of ranks in a round: the mean of the turns on either side of it."""
    return {label: (before[label] + after[label]) / 2 for label in before if label in after}
