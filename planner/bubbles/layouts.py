"""Layouts of the backbone worth a closer look, and why the others are not.

``dp x pp x tp`` devices with ``chunks`` virtual stages a rank; tensor parallel groups stay inside a
host. The estimate that ranks them is the usual one (``theory``; Narayanan et al. 2021):

    passes of a rank x (1 + (pp - 1) / (chunks x microbatches)) + exposed gather and reduction

Of ranks of unlike speed, which get layers as suits them (`dealt_s`), that of the longest counts,
and ``pp - 1`` is how often the passes of the others fill its own. Where virtual stages do not
divide the layers, every stage counts as long as the longest.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from foreplan.cost_models.costs import CostBook, Work
from foreplan.cost_models.memory import show_bytes
from foreplan.errors import InfeasibleError, MissingDataError, SpecError
from foreplan.planner.base import Problem
from foreplan.planner.bubbles.backbone import backbone_stages, schedule_name
from foreplan.planner.bubbles.ledger import capacity_bytes
from foreplan.planner.bubbles.memory import state_bytes
from foreplan.planner.bubbles.memory_cuts import MemoryCuts
from foreplan.planner.bubbles.shared_work import dealt_s, shared_work_s
from foreplan.planner.bubbles.spec import BackbonePlan, BubblesWorkload
from foreplan.planner.bubbles.training_step import TrainingStep

#: Layouts that are simulated and filled, best estimate first.
CLOSER = 3


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout that may fit.

    Attributes:
        plan: the layout.
        microbatches: of each pipeline in a step.
        estimate_s: seconds of the backbone's step.
        work_s: no step under this layout is shorter: the larger of the backbone's passes and of
            all computation, encoders included, dealt to the ranks as suits their speeds best.
    """

    plan: BackbonePlan
    microbatches: int
    estimate_s: float
    work_s: float


def device_count(problem: Problem[BubblesWorkload]) -> int:
    """Devices that the plan may use.

    Raises:
        SpecError: more than the cluster has.
    """
    have = len(problem.cluster.ranks())
    wanted = problem.workload.devices or have
    if wanted > have:
        raise SpecError("workload.devices", got=wanted, expected=f"at most the cluster's {have}")
    return wanted


def microbatches_of(workload: BubblesWorkload, plan: BackbonePlan) -> int:
    """Micro-batches of each pipeline in a step.

    Raises:
        SpecError: a batch that does not divide.
    """
    if workload.microbatches is not None:
        return workload.microbatches
    assert workload.global_batch is not None
    samples = plan.dp * workload.microbatch
    if workload.global_batch % samples:
        raise SpecError(
            "global_batch", got=workload.global_batch,
            expected=f"a multiple of dp x microbatch = {plan.dp} x {workload.microbatch}",
        )  # fmt: skip
    return workload.global_batch // samples


def layouts(
    problem: Problem[BubblesWorkload], *, by_memory: bool = False
) -> tuple[list[Layout], dict[str, str]]:
    """Layouts that may fit, best first, and the reasons against the rest.

    With a layout in the workload that one alone.

    Args:
        problem: what to plan.
        by_memory: also those that only stages of unlike size fit, see `MemoryCuts`.

    Raises:
        SpecError: the workload's layout does not suit the model, the batch or the cluster.
        InfeasibleError: no layout fits.
    """
    w = problem.workload
    count = device_count(problem)
    if w.plan is not None:
        plan = w.plan
        if plan.devices > count:
            raise SpecError(
                "plan", got=f"dp {plan.dp} x pp {plan.pp} x tp {plan.tp} = {plan.devices} devices",
                expected=f"at most {count} devices",
            )  # fmt: skip
        step = TrainingStep(problem, plan)
        microbatches = microbatches_of(w, plan)
        reason = _unsuitable(step, w, microbatches)
        if reason is not None:
            raise SpecError("plan", got=plan.words, expected=reason)
        return [_layout(problem, step, microbatches)], {}
    if w.global_batch is None:
        # Micro-batches of one pipeline are given: other numbers of replicas are other batches.
        replicas = [1]
    else:
        replicas = [dp for dp in range(1, count + 1) if count % dp == 0]
    kept: list[Layout] = []
    reasons: Counter[str] = Counter()
    examples: dict[str, BackbonePlan] = {}
    for plan in _candidates(problem, count, replicas):
        step = TrainingStep(problem, plan)
        try:
            microbatches = microbatches_of(w, plan)
            reason = _unsuitable(step, w, microbatches)
            if reason is None:
                reason = _too_large(problem, step, microbatches)
                if reason is not None and by_memory and _can_be_cut(problem, step, microbatches):
                    reason = None
        except SpecError as error:
            reason = f"{error.where} that is {error.expected}"
        if reason is None:
            kept.append(_layout(problem, step, microbatches))
        else:
            reasons[reason] += 1
            examples.setdefault(reason, plan)
    rejected = {
        f"{times} layout{'s' if times > 1 else ''} such as {examples[reason].words}": reason
        for reason, times in reasons.most_common(8)
    }
    if not kept:
        shown = "; ".join(f"{name}: needs {reason}" for name, reason in rejected.items())
        alone = " in one pipeline" if w.global_batch is None and count > 1 else ""
        raise InfeasibleError(
            f"no layout of {count} devices{alone} suits the backbone: {shown or 'none divides'}",
            fix=_fix(problem, count),
        )
    return sorted(kept, key=lambda layout: layout.estimate_s), rejected


def _fix(problem: Problem[BubblesWorkload], count: int) -> str:
    """What to do where no layout suits; replicas first, where they were not searched and would."""
    text = "use another number of devices, a smaller micro-batch or more recomputation"
    w = problem.workload
    if w.microbatches is None:
        return text
    for plan in _candidates(problem, count, [dp for dp in range(2, count + 1) if count % dp == 0]):
        if not _suits(problem, plan, w.microbatches):
            continue
        sizes = {"dp": plan.dp, "pp": plan.pp, "tp": plan.tp, "chunks": plan.chunks}
        stated = ", ".join(f"{name}: {size}" for name, size in sizes.items() if size > 1)
        return (
            "state global_batch instead of microbatches, so that data parallel replicas are "
            f"searched, or a layout that has them, such as plan: {{{stated}}}; or {text}"
        )
    return text


def _suits(problem: Problem[BubblesWorkload], plan: BackbonePlan, microbatches: int) -> bool:
    step = TrainingStep(problem, plan)
    try:
        unsuited = _unsuitable(step, step.workload, microbatches)
        return (unsuited or _too_large(problem, step, microbatches)) is None
    except MissingDataError:  # a device whose memory is not known
        return False


def _candidates(
    problem: Problem[BubblesWorkload], count: int, replicas: list[int]
) -> Iterator[BackbonePlan]:
    hosts = Counter(rank.host for rank in problem.cluster.ranks()[:count])
    widest = min(hosts.values())
    for dp in replicas:
        rest = count // dp
        for tp in (t for t in range(1, min(rest, widest, 8) + 1) if rest % t == 0):
            pp = rest // tp
            for chunks in (1, 2, 3, 4, 6, 8, 12) if pp > 1 else (1,):
                yield BackbonePlan(dp=dp, pp=pp, tp=tp, chunks=chunks)


def _unsuitable(step: TrainingStep, w: BubblesWorkload, microbatches: int) -> str | None:
    """What a layout would need to suit model and batch, or ``None``."""
    plan = step.plan
    if step.backbone.layers < plan.pp * plan.chunks:
        return f"pp x chunks of at most the {step.backbone.layers} layers of the backbone"
    for tower in (step.backbone, *step.encoders):
        if not tower.takes_tp(plan.tp):
            return f"tp that divides the {tower.heads} heads and the MLP of {tower.name}"
    if plan.chunks > 1:
        if w.schedule != "interleaved-1f1b":
            return f"one chunk, as {w.schedule} has"
        if microbatches % plan.pp:
            return f"micro-batches ({microbatches}) in multiples of pp, to interleave"
    return None


def _too_large(
    problem: Problem[BubblesWorkload], step: TrainingStep, microbatches: int
) -> str | None:
    """Why the backbone alone does not fit: states, and activations of what is in flight.

    Source of the number in flight: Korthikanti et al. 2022, section 4.2.3.
    """
    plan, w = step.plan, step.workload
    stages = backbone_stages(step.backbone.layers, plan)
    own = sum(step.backbone.range_parameters(s.start, s.end) for s in stages if s.rank == 0)
    states = state_bytes(
        own // plan.tp, replicas=plan.dp, sharded=w.sharded_optimizer,
        weight_bytes=step.arithmetic.element_bytes,
        optimizer_bytes=step.arithmetic.optimizer_bytes,
    )  # fmt: skip
    flying = min(microbatches, plan.pp) * (1 + (plan.pp - 1) / (plan.pp * plan.chunks))
    if w.schedule == "gpipe":
        flying = microbatches
    each = sum(step.activation_bytes(s.start, s.end) for s in stages if s.rank == 0)
    need = sum(states.values()) + min(flying, microbatches) * each
    room = capacity_bytes(problem, step, 0)
    if need <= room:
        return None
    return f"more than the {show_bytes(room)} of a device for the backbone alone"


def _can_be_cut(problem: Problem[BubblesWorkload], step: TrainingStep, microbatches: int) -> bool:
    """Whether stages of unlike size fit: the backbone alone, or in one chain with the encoder."""
    if step.plan.chunks > 1:
        return False
    cuts = MemoryCuts(problem, step, microbatches)
    for cut in (cuts.bare, *([cuts.chain] if len(step.encoders) == 1 else [])):
        with contextlib.suppress(InfeasibleError):
            cut()
            return True
    return False


def _layout(problem: Problem[BubblesWorkload], step: TrainingStep, microbatches: int) -> Layout:
    plan, costs = step.plan, problem.costs

    def seconds(work: Work, device: str) -> float:
        return costs.cost(work, device).mean_s

    # A layer inside, without embedding and head; pieces leave out the collectives.
    one = (1, 2) if step.backbone.layers > 2 else (0, 1)
    layer = [step.passes(*one, op) for op in ("F", "B")]
    speeds = [sum(seconds(work, device) for work in layer) for device in step.devices]
    name = schedule_name(step.workload.schedule, plan.chunks)
    chunks = plan.chunks if name == "interleaved-1f1b" else 1
    busy = dealt_s(speeds, microbatches * step.backbone.layers, microbatches * plan.chunks)
    virtual = plan.pp * plan.chunks
    longest = -(-step.backbone.layers // virtual)
    busy = [each * longest * virtual / step.backbone.layers for each in busy]
    passes = max(busy)
    others = sum(each / passes for each in busy) - 1 if passes else 0.0
    estimate = passes * (1 + others / (chunks * microbatches))
    if plan.dp > 1:
        own = step.backbone.range_parameters(*one) // plan.tp
        own *= longest
        # Each device of a long ring moves twice the share that each of two does.
        group = step.replica_group((0,))[:2]
        for work in (step.steps.gather, step.steps.scatter):
            estimate += 2 * seconds(work(own, group, encoder=False), step.devices[0])
    return Layout(plan, microbatches, estimate, _work_s(step, costs, microbatches))


def _work_s(step: TrainingStep, costs: CostBook, microbatches: int) -> float:
    """Seconds that no step takes less than, however layers and encoders are dealt to ranks."""

    def seconds(works: Iterable[Work], device: str) -> float:
        return sum(costs.cost(work, device).mean_s for work in works)

    devices = step.devices
    inside = step.backbone.layers > 2  # a layer that neither embedding nor head is part of
    layer = [work for op in ("F", "B") for work in step.halves(op)]
    rows = [[seconds(layer, device)] for device in devices]
    counts = [float(microbatches * step.backbone.layers)]
    backbone = shared_work_s(rows, counts)
    if inside and len({row[0] for row in rows}) == 1:
        # Lanes of unlike ranks may be joined by faster links than those of the first.
        passes = [step.passes(1, 2, op) for op in ("F", "B")]
        backbone = counts[0] / step.plan.pp * seconds(passes, devices[0])
    for first in (True, False):
        end = [work for op in ("F", "B") for work in step.end(op, first=first)]
        for row, device in zip(rows, devices, strict=True):
            row.append(seconds(end, device))
        counts.append(float(microbatches) if end else 0.0)
    for e, tower in enumerate(step.encoders):
        ops = ("F",) if step.encoder(e).frozen else ("F", "B")
        for half in (0, 1):  # of a layer, which a unit's ends may lie between
            units = [step.encoder_halves(e, op)[half] for op in ops]
            for row, device in zip(rows, devices, strict=True):
                row.append(seconds(units, device))
            counts.append(float(microbatches * tower.layers))
    return max(backbone, shared_work_s(rows, counts))
