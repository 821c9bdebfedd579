"""`HostedSimulator`: a schedule whose GPUs run what their hosts have issued; `simulator` picks it.

On a GPU the host queues the kernels of one action after the other and runs ahead of the device. It
waits for nothing in a step: receives, flags of other GPUs and collectives hold up streams (NCCL,
copy engines), and the queue is taken to be as long as it has to be. So a rank is two queues, as in
``replay.py``, where every operator is one kernel or few; here an action is many kernels, and the
device runs the first of them while the host issues the rest:

    start of an action >= begin of its issue,   its end >= end of its issue.

In the words of ``schedule.py``: a ``launch`` on the queue ``host`` stands before an action, the
action waits for the launch before that, and an instant action behind both, on the action's own
resources, is its end. Actions that the host takes no time for follow what they depend on. Where
issuing takes longer than running, the host decides the step and the device idles; a host that has
been ahead, because its device waited, is so until it has lost what it was ahead.

On a CPU the host is the device: what it takes is inside what was measured, and nothing is issued.

Not modelled: a host that has to wait because too many kernels are queued (CUDA takes about a
thousand), and gloo between GPUs, whose messages the host carries itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from foreplan.cost_models.costs import CostBook, HostLaunch
from foreplan.cost_models.schedule import (
    HOST,
    SHARED_PREFIX,
    FloatArray,
    IntArray,
    Schedule,
    ScheduleBuilder,
)
from foreplan.cost_models.simulator import Contention, Simulator
from foreplan.cost_models.timeline import Timeline
from foreplan.errors import SpecError

_FREE = HostLaunch(0)


class HostedSimulator(Simulator):
    """A schedule whose ranks have hosts, made ready to be timed many times.

    Without host time it is the `Simulator` of the schedule. No step is shorter than that one's, and
    none ends before the host that needs longest has issued its list.

    Args:
        schedule: what runs.
        issue_s: seconds that the host takes to issue each action, shape ``(len(schedule),)``.
        contention, capacities: as of `Simulator`.

    Raises:
        SpecError: as `Simulator`, and host time that is no time.
    """

    def __init__(
        self,
        schedule: Schedule,
        issue_s: FloatArray,
        *,
        contention: Contention | None = None,
        capacities: Mapping[str, int] | None = None,
    ) -> None:
        if issue_s.shape != (len(schedule),):
            raise SpecError(
                "issue_s", got=issue_s.shape, expected=f"one for each of {len(schedule)}"
            )
        wrong = ~(np.isfinite(issue_s) & (issue_s >= 0.0))
        if wrong.any():
            raise SpecError(
                "issue_s", got=float(issue_s[np.argmax(wrong)]), expected="times of at least 0"
            )
        self._alone, issued = schedule, issue_s > 0.0
        # Places of each action, and of the instant action that ends it.
        self._body: IntArray = np.cumsum(np.where(issued, 3, 1)) - np.where(issued, 2, 1)
        self._end: IntArray = self._body + issued
        super().__init__(
            _with_hosts(schedule, issued, self._end), contention=contention, capacities=capacities
        )
        self._seconds = np.zeros(len(self.schedule))
        self._seconds[self._body[issued] - 1] = issue_s[issued]
        # Whose end a place of the longer schedule is; a launch is nobody's.
        self._owner: IntArray = np.full(len(self.schedule), -1, dtype=np.int64)
        self._owner[self._body] = self._owner[self._end] = np.arange(len(schedule))

    def run(self, duration: FloatArray) -> Timeline:
        """Time every action; an action lasts until its host has issued all of it.

        Args:
            duration: seconds of each action on its device, shape ``(len(schedule),)``.

        Returns:
            Of the schedule itself, without launches; what a host held up is bound by nothing.

        Raises:
            SpecError: as `Simulator.run`.
        """
        if duration.shape != self._body.shape:
            raise SpecError("duration", got=duration.shape, expected=f"{self._body.shape}")
        seconds = self._seconds.copy()
        seconds[self._body] = duration
        ran = super().run(seconds)
        binding = ran.binding[self._body]
        released = np.where(binding >= 0, self._owner[binding], -1)
        start, end = ran.start_s[self._body], ran.end_s[self._end]
        # A meeting goes by its first member, whom the host may keep longer than the one meant.
        released[(released >= 0) & (end[released] > start)] = -1
        return Timeline(self._alone, start, end, released, kind="simulated")


def simulator(
    schedule: Schedule, costs: CostBook, *, contention: Contention | None = None
) -> Simulator:
    """The simulator of a schedule: with hosts where the book knows what issuing its works takes."""
    if not costs.issued:
        return Simulator(schedule, contention=contention)
    issue_s = np.array([costs.issue_s(work) for work in schedule.works], dtype=np.float64)
    return HostedSimulator(schedule, issue_s[schedule.work], contention=contention)


def _with_hosts(schedule: Schedule, issued: npt.NDArray[np.bool_], end: IntArray) -> Schedule:
    """The schedule with launches and ends; ``end`` has the place of each action's end."""
    builder = ScheduleBuilder(schedule.devices)
    before: dict[int, int] = {}  # the last launch of each rank
    for i, action in enumerate(schedule):
        needs = [int(end[d]) for d in action.dependencies]
        if issued[i]:
            launch = builder.add("launch", action.rank, _FREE, resources=(HOST,))
            if action.rank in before:
                needs.append(before[action.rank])
            before[action.rank] = launch
        body = builder.add(
            action.op, action.rank, action.work, stage=action.stage, microbatch=action.microbatch,
            step=action.step, peer=action.peer, dependencies=needs, resources=action.resources,
            rendezvous=action.rendezvous, pressure=action.pressure,
        )  # fmt: skip
        if issued[i]:
            own = tuple(r for r in action.resources if not r.startswith(SHARED_PREFIX))
            builder.add("end", action.rank, _FREE, dependencies=(launch, body), resources=own)
    return builder.build()
