"""The indicator that a workload asks for: what each variant of each module costs in quality."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator

from foreplan.cost_models.quality.gradient_variance import (
    Batch,
    Calibration,
    Omega,
    depth_weighted,
    first_order,
    gradient_variance,
)
from foreplan.cost_models.quality.weight_indicators import (
    hessian,
    hutchinson_traces,
    random_order,
    uniform,
    weight_change,
)
from foreplan.datasets.kernels.training_variant import (
    TRAINING_VARIANTS,
    TrainingVariant,
    variants_of,
)
from foreplan.datasets.timing.host_memory import within_free_memory
from foreplan.planner.precision.graph import TrainingGraph
from foreplan.planner.precision.spec import DEFAULT_PRECISIONS, Indicator, PrecisionWorkload
from foreplan.planner.precision.task import TrainingTask

#: The default one differentiates a step twice in FP32: 14-20 times a step's own activations.
_LESS_MEMORY = "a smaller batch takes less, and indicator=weight_change or uniform next to nothing"


def module_variants(
    graph: TrainingGraph, precisions: Collection[str] = DEFAULT_PRECISIONS
) -> dict[str, dict[str, TrainingVariant]]:
    """Every variant of some precisions that exists for each module, on whatever device."""
    found: dict[str, dict[str, TrainingVariant]] = {}
    for i in graph.adjustable:
        o = graph.operators[i]
        n, k = o.weight_shape[:2] if o.family == "linear" else (0, 0)
        texts = variants_of(o.family, n=n, k=k)
        known = {text: TRAINING_VARIANTS[text] for text in texts}
        found[o.module] = {t: v for t, v in known.items() if v.precision in precisions}
    return found


def omega_table(
    task: TrainingTask,
    graph: TrainingGraph,
    workload: PrecisionWorkload,
    seed: int,
    *,
    indicator: Indicator | None = None,
) -> Omega:
    """Omega by module and variant; 0 for fp32.

    Args:
        task: whose calibration batches are run where the indicator needs them.
        graph: of the task.
        workload: names the indicator, its batches and gamma.
        seed: of random choices.
        indicator: another one than the workload's.

    Raises:
        SpecError: statistics that are not finite.
        InfeasibleError: the indicator needs more memory than this host has free.
    """
    chosen, variants = indicator or workload.indicator, module_variants(graph, workload.precisions)
    if chosen == "uniform":
        return uniform(variants)
    if chosen == "random":
        return random_order(variants, seed)
    with within_free_memory(f"the indicator {chosen} of this network", _LESS_MEMORY):
        return _of_the_network(chosen, task, graph, workload, seed, variants)


def _of_the_network(
    chosen: Indicator,
    task: TrainingTask,
    graph: TrainingGraph,
    workload: PrecisionWorkload,
    seed: int,
    variants: dict[str, dict[str, TrainingVariant]],
) -> Omega:
    """The indicators that run the network, or read its weights."""
    module = task.module()
    if chosen == "weight_change":
        return weight_change(module, variants)
    if chosen == "hessian":
        batches = _batches(task, workload)
        traces = hutchinson_traces(module, batches, task.loss, variants, seed)
        return hessian(module, variants, traces)
    sample = Calibration(module, _batches(task, workload), task.loss, variants)
    if chosen == "depth_weighted":
        return depth_weighted(sample, _depths(graph), gamma=workload.gamma)
    added = first_order if chosen == "first_order" else gradient_variance
    return added(sample, gamma=workload.gamma, seed=seed)


def _batches(task: TrainingTask, workload: PrecisionWorkload) -> Iterator[Batch]:
    """Calibration batches: steps before the first."""
    steps = itertools.count(-1, -1)
    return (task.batch(step, 0) for step in itertools.islice(steps, workload.calibration_batches))


def _depths(graph: TrainingGraph) -> dict[str, int]:
    depth = graph.depth()
    return {graph.operators[i].module: depth[i] for i in reversed(graph.adjustable)}
