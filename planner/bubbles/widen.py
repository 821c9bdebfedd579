"""`widen`: a schedule whose ranks stand for several tensor parallel lanes, lane by lane.

Lane ``t`` of pipeline rank ``r`` is rank ``r tp + t``; lanes send to the same lane of other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from foreplan.cost_models.schedule import Schedule
from foreplan.cost_models.schedule_builder import ScheduleBuilder
from foreplan.errors import SpecError


def widen(schedule: Schedule, devices: Sequence[str], lanes: int) -> Schedule:
    """A schedule with one rank for each lane of every pipeline rank.

    All lanes of a rank carry out its whole list; transfers and collectives connect equal lanes.

    Args:
        schedule: one rank stands for all of its lanes.
        devices: of every lane, lanes of a pipeline rank side by side.
        lanes: tensor parallel devices of a pipeline rank.

    Raises:
        SpecError: another number of devices.
    """
    if len(devices) != schedule.ranks * lanes:
        raise SpecError(
            "devices", got=len(devices), expected=f"{schedule.ranks} ranks of {lanes} lanes"
        )
    builder, count = ScheduleBuilder(devices), len(schedule)
    for lane in range(lanes):
        for action in schedule:
            builder.add(
                action.op, action.rank * lanes + lane, action.work, stage=action.stage,
                microbatch=action.microbatch, step=action.step,
                peer=action.peer if action.peer < 0 else action.peer * lanes + lane,
                dependencies=[lane * count + d for d in action.dependencies],
                resources=action.resources, memory=action.memory, pressure=action.pressure,
                rendezvous=action.rendezvous if action.rendezvous < 0
                else action.rendezvous * lanes + lane,
            )  # fmt: skip
    return builder.build(schedule.notes)
