"""`why_infeasible`: what a serving problem lacks, by how much, and what would make it fit."""

from __future__ import annotations

from foreplan.cost_models.memory import show_bytes, show_missing
from foreplan.errors import InfeasibleError, MissingDataError
from foreplan.planner.serving.cases import least_obstacle
from foreplan.planner.serving.chain import ServingChains, static_bytes
from foreplan.planner.serving.pricing import PREFILL, MicroBatches
from foreplan.planner.serving.time_limits import too_short
from foreplan.planner.serving.workspace import StageWorkspace
from foreplan.solvers.chain_diagnosis import ChainDiagnosis, Obstacle


def why_infeasible(chains: ServingChains) -> InfeasibleError:
    """Say in the user's words why no decision was found.

    Looked for in this order: memory of all devices together, devices that cannot run the model,
    limits on times, then what stands in the way of the grouping that comes nearest to fitting.

    Args:
        chains: the problems of which none has an answer.

    Raises:
        MissingDataError: the layers have no price anywhere.
    """
    model, workload = chains.pricing.model, chains.pricing.workload
    fewest = min(workload.bits)
    least = (fewest,) * model.layers
    smallest = MicroBatches(workload.prefill_microbatch or 1, workload.decode_microbatch or 1)
    whole = static_bytes(model, workload, 0, model.layers, least)
    rank = chains.cluster.ranks()[0]
    space = StageWorkspace(
        model, workload, smallest, rank.kernel_kind, compute_capability=rank.compute_capability
    )
    need = sum(whole.values()) + space.stage_bytes(0, model.layers, least, whole["kv_cache"])
    usable = chains.usable()
    have = float(usable @ chains.capacity)
    devices = f"{int(usable.sum())} device{'s' if usable.sum() != 1 else ''}"
    if usable.sum() < len(chains.cluster.ranks()):
        devices += f" that tensor_parallel={workload.tensor_parallel} can put together"
    if need > have:
        item = max(whole, key=whole.__getitem__)
        size = show_bytes(whole[item])
        if item == "weights" and model.experts is not None:
            size += f", all {model.experts.count} experts of a layer"
        cached = item == "kv_cache" and workload.cache_bits == 16
        eight = ", or plan with kv_bits=8" if cached else ""
        return InfeasibleError(
            f"{model.name} at {fewest} bits needs {show_bytes(need)}, above all {item} "
            f"({size}), of the {show_bytes(have)} of {devices}",
            fix=f"add {show_missing(need - have)}, or lower the batch or the context{eight}",
        )
    for k, why in chains.unable().items():
        return InfeasibleError(f"no split of {model.name} without {chains.name(k)}: {why}")
    if (unpriced := _unpriced(chains)) is not None:
        raise unpriced
    late = too_short(workload, [chains.problem(sizes) for sizes in chains.sizes()])
    if late is not None:
        return late
    # Of the least workspace.
    sizes = min(chains.sizes(), key=lambda s: (s.prefill, s.decode, not s.lean))
    return _in_the_way(chains, least_obstacle(chains, sizes), devices)


def _unpriced(chains: ServingChains) -> MissingDataError | None:
    """Why no device has a kernel for a layer, where the reason is its price."""
    sizes = chains.sizes()[0]
    linear = tuple(f"{PREFILL}/linear/{bits}" for bits in chains.bits)
    reason = None
    for k in range(len(chains.kinds)):
        if any(key in chains.kernels(k, sizes).table for key in linear):
            return None
        reason = reason or chains.pricing.without_linears(chains.first(k), sizes)
    return reason


def _in_the_way(chains: ServingChains, found: ChainDiagnosis, devices: str) -> InfeasibleError:
    """What the solver found in the way, where the devices' memory together would do."""
    model, workload = chains.pricing.model, chains.pricing.workload
    grouped = workload.tensor_parallel not in (1, "auto")
    else_auto = ", or let tensor_parallel be auto" if grouped else ""
    if found.obstacle is Obstacle.COST2:
        return InfeasibleError(
            f"{model.name} fits the {devices} at {-found.need / model.layers:.4g} bits on "
            f"average at most, below min_average_bits {workload.min_average_bits}",
            fix="lower min_average_bits, the batch or the context, or give more memory" + else_auto,
        )
    if found.obstacle is Obstacle.MEMORY:
        short = "; ".join(
            f"layers {a}-{b - 1} need {show_bytes(size)} of the {show_bytes(room)} of "
            f"{chains.name(k)}"
            for k, a, b, size, room in found.stages
            if size > room
        )
        return InfeasibleError(
            f"no split of {model.name} over {devices} fits: {short}",
            fix=f"give {show_missing(found.excess)} more, or lower the batch or the context"
            + else_auto,
        )
    return InfeasibleError(
        f"no split of {model.name} over {devices} meets every limit: {found.message}",
        fix="relax min_average_bits, max_omega or max_perplexity_increase, or give more memory",
    )
