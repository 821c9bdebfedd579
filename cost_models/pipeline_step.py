"""One training step of a uniform pipeline: what ``foreplan simulate pipeline`` answers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from foreplan.cost_models.costs import CostBook
from foreplan.cost_models.pipeline import (
    bubble_rate,
    given_costs,
    pipeline_cost_s,
    pipeline_schedule,
)
from foreplan.cost_models.simulator import simulate
from foreplan.cost_models.timeline import Timeline
from foreplan.errors import SpecError


@dataclass(frozen=True)
class PipelineResult:
    """A simulated pipeline step.

    Attributes:
        bubble_rate: 1 - ideal / cost.
        iteration_s: cost: the longest span of a rank, seconds.
        makespan_s: first start to last end over all ranks, seconds.
        peak_activations: of each stage, in micro-batches; a chunk counts 1 / chunks.
        timeline: every action.
    """

    bubble_rate: float
    iteration_s: float
    makespan_s: float
    peak_activations: tuple[float, ...]
    timeline: Timeline

    def document(self) -> dict[str, object]:
        """The result as ``foreplan simulate pipeline --json`` prints it."""
        return {
            "bubble_rate": self.bubble_rate,
            "iteration_s": self.iteration_s,
            "makespan_s": self.makespan_s,
            "peak_activations": list(self.peak_activations),
        }


def simulate_pipeline(
    schedule: str, *, stages: int, microbatches: int, chunks: int = 1, forward_s: float,
    backward_input_s: float, backward_weight_s: float, transfer_s: float = 0.0,
) -> PipelineResult:  # fmt: skip
    """Simulate equal stages; times in seconds, with chunks per chunk.

    Raises:
        SpecError: as `pipeline_order` and `given_costs`; times whose sum is no number.
    """
    costs = given_costs(forward_s, backward_input_s, backward_weight_s, transfer_s)
    built = pipeline_schedule(schedule, stages=stages, microbatches=microbatches, chunks=chunks)
    timeline = simulate(built, CostBook((), given=costs))
    ideal = microbatches * chunks * (forward_s + backward_input_s + backward_weight_s)
    if not math.isfinite(ideal + timeline.makespan_s):
        raise SpecError("pipeline times", got=math.inf, expected="a step that ends")
    peaks = [peak.get("activations", 0) / chunks for peak in timeline.peak_memory()]
    return PipelineResult(
        bubble_rate(timeline, ideal), pipeline_cost_s(timeline), timeline.makespan_s,
        tuple(int(p) if p == int(p) else p for p in peaks), timeline,
    )  # fmt: skip
