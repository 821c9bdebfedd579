"""The programs that training steps of a network are made of: what to measure before planning."""

from __future__ import annotations

from foreplan.cost_models.costs import CostBook, Work
from foreplan.datasets.models.model import Model
from foreplan.datasets.program import Program
from foreplan.planner.precision.graph import TrainingGraph
from foreplan.planner.precision.pricing import StepTables, Unpriced
from foreplan.planner.precision.spec import PrecisionWorkload
from foreplan.planner.precision.task import training_task


def precision_programs(
    model: Model | None, workload: PrecisionWorkload, device_kind: str
) -> list[Program]:
    """Passes, casts and update of every operator in every variant that a device kind has.

    Args:
        model: the model, or ``None`` where the workload names a network of its own.
        workload: batch, lengths, precisions and optimizer.
        device_kind: ``cpu`` or ``cuda``.

    Returns:
        Each program once, in the order of the forward pass, casts afterwards.

    Raises:
        SpecError: a network that cannot be traced.
    """
    graph = TrainingGraph.of(training_task(model, workload, seed=0))
    tables = StepTables(graph, CostBook([Unpriced()]), "device", device_kind, workload.precisions)
    found: dict[Work, None] = {}
    for options in tables.options:
        for option in options:
            found.update(dict.fromkeys((*option.forward, *option.backward)))
    for edge in tables.edges:
        for row in (*edge.forward, *edge.backward):
            for works in row:
                found.update(dict.fromkeys(works))
    found[graph.update(workload.optimizer)] = None
    return [work for work in found if isinstance(work, Program)]
