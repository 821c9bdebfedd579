"""The programs that a multimodal step is made of: what to measure before planning."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from foreplan.cost_models.costs import CostBook, Segment, Work
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.models.model import Model
from foreplan.datasets.program import Program
from foreplan.datasets.specs import validate
from foreplan.planner.base import Problem
from foreplan.planner.bubbles.placement import BUCKETS
from foreplan.planner.bubbles.recompute import candidates, under
from foreplan.planner.bubbles.spec import BackbonePlan, BubblesWorkload
from foreplan.planner.bubbles.training_step import TrainingStep


def bubbles_programs(
    model: Model | None, workload: BubblesWorkload, device: DeviceName, *, devices: int
) -> list[Program]:
    """Every operator of every pass of backbone and encoders.

    They depend on a layout by its tensor parallelism alone: on the workload's own where it states
    one, else on each that the devices allow; and on what is computed again, where that is open.

    Args:
        model: the backbone, or ``None`` where the workload states its sizes.
        workload: encoders, batch and lengths.
        device: where; says the dtype.
        devices: how many there are.

    Returns:
        Each program once.

    Raises:
        SpecError: neither a model nor sizes of the backbone, or an unknown encoder.
    """
    cluster = validate(Cluster, {"devices": [{"name": str(device)}]}, "cluster")
    asked = Problem(model, cluster, workload, CostBook(()))
    posed = [under(asked, chosen) for chosen in candidates(asked)[0]]
    plans = [BackbonePlan(tp=tp) for tp in range(1, devices + 1) if devices % tp == 0]
    found: dict[Program, None] = {}
    wanted = [workload.plan] if workload.plan is not None else plans
    for plan, problem in itertools.product(wanted, posed):
        step = TrainingStep(problem, plan)
        if not all(tower.takes_tp(plan.tp) for tower in (step.backbone, *step.encoders)):
            continue
        split = workload.schedule.startswith("zb")
        for op in ("F", "B", *(("I", "W") if split else ())):
            _collect(step.passes(0, step.backbone.layers, op), found)
        for e, tower in enumerate(step.encoders):
            for op in ("F",) if step.encoder(e).frozen else ("F", "B"):
                _collect(step.unit(e, plan.tp, 0, 2 * tower.layers, op, bare=False), found)
        for parameters, tensors in _optimizers(step, plan.devices if workload.plan else devices):
            _collect(step.steps.optimizer(parameters, tensors), found)
    return list(found)


def bubbles_pass(
    model: Model | None, workload: BubblesWorkload, device: DeviceName, *, devices: int
) -> dict[Program, int]:
    """What a rank computes for one micro-batch: programs with their calls.

    Of a stage without ends, forward and backward, and of as many layers of each encoder as a rank
    has of them; under the workload's layout, or one stage a device where it states none. On a GPU,
    where a step replays graphs and the profile's calls are issued, what else the step may be made
    of comes along, once each.

    Args:
        model: the backbone, or ``None`` where the workload states its sizes.
        workload: encoders, batch and lengths.
        device: where; says the dtype.
        devices: how many there are.
    """
    cluster = validate(Cluster, {"devices": [{"name": str(device)}]}, "cluster")
    asked = Problem(model, cluster, workload, CostBook(()))
    chosen = candidates(asked)[0][0]
    step = TrainingStep(under(asked, chosen), workload.plan or BackbonePlan(pp=devices))
    stages = step.plan.pp
    found: dict[Program, int] = {}
    layers = max(1, step.backbone.layers // stages)
    first = min(layers, step.backbone.layers - layers)
    for op in ("F", "B"):
        _count(step.passes(first, first + layers, op), 1, found)
    for e, tower in enumerate(step.encoders):
        halves = 2 * max(1, tower.layers // stages)
        for op in ("F",) if step.encoder(e).frozen else ("F", "B"):
            _count(step.unit(e, step.plan.tp, 0, halves, op, bare=False), 1, found)
    if device.kind == "cuda":
        for item in bubbles_programs(model, workload, device, devices=devices):
            if item.op != "optimizer_step":
                found.setdefault(item, 1)
    return found


def _count(work: Work, times: int, found: dict[Program, int]) -> None:
    if isinstance(work, Program):
        found[work] = found.get(work, 0) + times
    elif isinstance(work, Segment):
        for part, count in work.parts:
            _count(part, times * count, found)


def _optimizers(step: TrainingStep, devices: int) -> Iterator[tuple[int, int]]:
    """Parameters and tensors of an optimizer's step around a device's even share.

    Decisions differ in both: a rank has one tensor of the backbone and one of each bucket of its
    encoders' stages.
    """
    towers = [step.backbone]
    towers += [t for e, t in enumerate(step.encoders) if not step.encoder(e).frozen]
    share, most = sum(t.parameters for t in towers) // devices, 1 + BUCKETS * (len(towers) - 1)
    for tensors in dict.fromkeys((1, most)):
        for parameters in (share // 4, share, share * 3 // 2):
            yield max(tensors, parameters), tensors


def _collect(work: Work, found: dict[Program, None]) -> None:
    if isinstance(work, Program):
        found[work] = None
    elif isinstance(work, Segment):
        for part, _ in work.parts:
            _collect(part, found)
