"""A bubble decision as a `Schedule`: the orders of its ranks with all communication put in.

A task (`TaskGraph`) is one or several rows of a rank (`StepRows`): its first row waits for the
tasks it needs, its last row releases the others.

Resources of a rank: ``compute``; ``tensor``, the link of its tensor parallel group, which
collectives occupy in list order; ``dp``, the network of its replicas. Transfers occupy nothing: a
lag, as in ``cost_models.pipeline``.
"""

from __future__ import annotations

from foreplan.cost_models.schedule import Schedule
from foreplan.cost_models.schedule_builder import ScheduleBuilder
from foreplan.planner.bubbles.decision import BubblesDecision
from foreplan.planner.bubbles.rank_writer import RankWriter
from foreplan.planner.bubbles.step_rows import StepRows
from foreplan.planner.bubbles.task_graph import TaskGraph
from foreplan.planner.bubbles.training_step import TrainingStep


class StepSchedule:
    """Builds the schedule of one decision.

    Args:
        step: works and bytes under the decision's layout.
        decision: what to schedule.

    Raises:
        SpecError: orders that are not whole, see `TaskGraph`.
    """

    def __init__(self, step: TrainingStep, decision: BubblesDecision) -> None:
        self._graph = TaskGraph(step, decision)

    def build(self) -> Schedule:
        """All ranks' rows with their dependencies."""
        rows = StepRows(self._graph)
        meetings: dict[tuple[str, int, int], int] = {}
        builder = ScheduleBuilder(self._graph.step.devices)
        for rank in range(len(rows.ranks)):
            RankWriter(self._graph, rows, builder, rank, meetings).write()
        return builder.build()

    def buckets(self, encoder: int, stage: int) -> list[tuple[int, int]]:
        """First unit of each bucket of an encoder stage and one past its last."""
        return self._graph.buckets(encoder, stage)
