"""`Times`: when the actions of a schedule ran or would run, as plans and verifications keep it."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from foreplan.cost_models.schedule import Schedule
from foreplan.cost_models.timeline import Timeline
from foreplan.datasets.specs import StrictModel
from foreplan.errors import SpecError

#: Schedules beyond this many actions are not written out with their times.
MOST_ACTIONS = 50_000

#: Bytes or microseconds; bounded, so that a stranger's number fits every reader.
Size = Annotated[int, Field(ge=0, lt=1 << 60)]


class Times(StrictModel):
    """When each action of the plan's schedule runs, in whole microseconds from the first start.

    The schedule itself follows from the decision, action by action in the same order.

    The actions themselves are not in the document; ``foreplan report --trace`` writes each with its
    rank, its name and these times.

    Attributes:
        start_us, duration_us: one value an action.
    """

    start_us: tuple[Size, ...]
    duration_us: tuple[Size, ...]

    @classmethod
    def of(cls, timeline: Timeline) -> Times | None:
        """The times of a timeline, ``None`` beyond `MOST_ACTIONS`."""
        if len(timeline.schedule) > MOST_ACTIONS:
            return None
        first_s = timeline.start_s.min(initial=np.inf)
        # Ends are rounded like starts: a rounded length may reach into the action behind it.
        start_us, end_us = (
            np.rint((moments - first_s) * 1e6) for moments in (timeline.start_s, timeline.end_s)
        )
        return cls(
            start_us=tuple(int(t) for t in start_us),
            duration_us=tuple(int(t) for t in end_us - start_us),
        )

    def timeline(self, schedule: Schedule, kind: Literal["simulated", "measured"]) -> Timeline:
        """The timeline of ``schedule`` that these times describe.

        Raises:
            SpecError: another number of actions.
        """
        if len(schedule) != len(self.start_us) or len(schedule) != len(self.duration_us):
            raise SpecError(
                "times", got=len(self.start_us), expected=f"one for each of {len(schedule)} actions"
            )
        start_us = np.asarray(self.start_us, dtype=np.float64)
        end_us = start_us + np.asarray(self.duration_us, dtype=np.float64)
        start, end = start_us * 1e-6, end_us * 1e-6
        return Timeline(schedule, start, end, np.full(len(schedule), -1), kind=kind)
