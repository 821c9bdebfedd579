"""The programs that training steps of a network are made of: what to measure before planning."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import chain

from foreplan.cost_models.costs import CostBook, Work
from foreplan.datasets.models.model import Model
from foreplan.datasets.program import Program
from foreplan.planner.precision.graph import TrainingGraph
from foreplan.planner.precision.pricing import StepTables, Unpriced, Works
from foreplan.planner.precision.spec import Precision, PrecisionWorkload, training_variant
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
    tables = _tables(model, workload, device_kind)
    found: dict[Work, None] = {}
    for options in tables.options:
        for option in options:
            found.update(dict.fromkeys((*option.forward, *option.backward)))
    for edge in tables.edges:
        for row in (*edge.forward, *edge.backward):
            for works in row:
                found.update(dict.fromkeys(works))
    found[tables.graph.update(workload.optimizer)] = None
    return [work for work in found if isinstance(work, Program)]


def precision_passes(
    model: Model | None, workload: PrecisionWorkload, device_kind: str
) -> tuple[dict[Program, int], ...]:
    """Passes by which ranks at work together are timed: one for each precision of the workload.

    Of every operator at that precision, or in fp32 where it has none, forward and then backward,
    and the update, which goes through all weights: the next forward pass finds no other in a cache.

    Args:
        model: as `precision_programs`.
        workload: likewise.
        device_kind: likewise.

    Returns:
        Programs of each pass with their calls, in the order in which a step meets them first.

    Raises:
        SpecError: a network that cannot be traced.
    """
    tables = _tables(model, workload, device_kind)
    update = tables.graph.update(workload.optimizer)
    return tuple(_pass(tables, precision, update) for precision in workload.precisions)


def _tables(model: Model | None, workload: PrecisionWorkload, device_kind: str) -> StepTables:
    graph = TrainingGraph.of(training_task(model, workload, seed=0))
    return StepTables(graph, CostBook([Unpriced()]), "device", device_kind, workload.precisions)


def _pass(tables: StepTables, precision: Precision, update: Work) -> dict[Program, int]:
    chosen = {}
    for i in tables.graph.adjustable:
        names = [option.name for option in tables.options[i]]
        alike = (name for name in names if training_variant(name).precision == precision)
        chosen[tables.graph.operators[i].module] = next(alike, names[0])
    choice = tables.choice(chosen)
    casts: dict[int, list[tuple[Works, Works]]] = defaultdict(list)
    for edge in tables.edges:
        a, b = choice[edge.producer], choice[edge.consumer]
        casts[edge.consumer].append((edge.forward[a][b], edge.backward[a][b]))
    options = [several[c] for several, c in zip(tables.options, choice, strict=True)]
    works: list[Work] = []
    for i, option in enumerate(options):
        works += [*chain.from_iterable(cast for cast, _ in casts[i]), *option.forward]
    for i, option in reversed(list(enumerate(options))):
        works += [*option.backward, *chain.from_iterable(cast for _, cast in casts[i])]
    works.append(update)
    return dict(Counter(work for work in works if isinstance(work, Program)))
