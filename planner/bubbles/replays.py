"""`Replay`: a decision with its simulated step, and whether that fits into memory."""

from __future__ import annotations

from dataclasses import dataclass

from foreplan.cost_models.simulator import Simulator, durations
from foreplan.cost_models.timeline import Timeline
from foreplan.errors import InfeasibleError
from foreplan.planner.base import Problem
from foreplan.planner.bubbles.decision import BubblesDecision
from foreplan.planner.bubbles.filling import Filled
from foreplan.planner.bubbles.ledger import ledgers
from foreplan.planner.bubbles.schedule import StepSchedule
from foreplan.planner.bubbles.spec import BubblesWorkload
from foreplan.planner.bubbles.training_step import TrainingStep


@dataclass(frozen=True, slots=True)
class Replay:
    """A decision with its simulated time.

    Attributes:
        decision: what was simulated.
        timeline: of the simulator.
        filled: how it was found, ``None`` for baselines.
    """

    decision: BubblesDecision
    timeline: Timeline
    filled: Filled | None = None

    @property
    def total_s(self) -> float:
        """Simulated step."""
        return self.timeline.makespan_s


def simulated(problem: Problem[BubblesWorkload], decision: BubblesDecision) -> Timeline:
    """A decision's step at the problem's prices.

    Raises:
        MissingDataError: a work without a price.
    """
    step = TrainingStep.of(problem, decision)
    schedule = StepSchedule(step, decision).build()
    made = Simulator(schedule, contention=step.contention)
    return made.run(durations(schedule, problem.costs))


def lacks(problem: Problem[BubblesWorkload], replay: Replay) -> str | None:
    """Which rank lacks how much memory for what, or ``None``."""
    step = TrainingStep.of(problem, replay.decision)
    peaks = replay.timeline.peak_memory()
    for rank, (ledger, peak) in enumerate(
        zip(ledgers(problem, step, replay.decision), peaks, strict=True)
    ):
        try:
            ledger.with_peak(peak).check(rank)
        except InfeasibleError as error:
            return str(error)
    return None
