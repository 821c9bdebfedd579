"""Small decisions and schedules that several tests of this folder use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from foreplan.cost_models.costs import Collective, HostLaunch
from foreplan.cost_models.schedule import Schedule, ScheduleBuilder
from foreplan.planner.precision.spec import PrecisionDecision, PrecisionWorkload, WorkerDecision
from foreplan.planner.precision.task import TrainingTask, fingerprint, training_task

BF16 = "fp32/bf16/torch.linear"
INT8 = "fp32/int8/torch.int_mm+bf16"
INT8_ALL = "fp32/int8/torch.int_mm+int8"


def workload(network: str = "byte_lm", **more: object) -> PrecisionWorkload:
    options: dict[str, object] = {"byte_lm": {"width": 32, "layers": 2, "context": 16},
                                  "digits_mlp": {"width": 32}, "digits_cnn": {"width": 8}}
    fields = {"batch": 4, "network": network, "network_options": options[network], **more}
    return PrecisionWorkload.model_validate(fields)


def task_of(work: PrecisionWorkload, seed: int = 0) -> TrainingTask:
    return training_task(None, work, seed)


def linears(module: nn.Module, text: str, multiple: int = 8) -> dict[str, str]:
    """One variant for all linears of fitting shapes."""
    return {
        name: text
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear)
        and part.in_features % multiple == part.out_features % multiple == 0
    }


def buckets_of(module: nn.Module, count: int) -> tuple[tuple[str, ...], ...]:
    """The parameters in reverse order, cut into buckets."""
    names = [name for name, _ in module.named_parameters()][::-1]
    cuts = [round(i * len(names) / count) for i in range(count + 1)]
    return tuple(tuple(names[a:b]) for a, b in zip(cuts, cuts[1:], strict=False))


def decision_of(
    module: nn.Module, plans: Sequence[Mapping[str, str]], buckets: int = 3
) -> PrecisionDecision:
    """Not validated, because these tests also carry out variants that no planner decides yet."""
    workers = tuple(
        WorkerDecision.model_construct(rank=r, device=f"cpu:{r}", operators=dict(plan))
        for r, plan in enumerate(plans)
    )
    return PrecisionDecision.model_construct(
        workers=workers, buckets=buckets_of(module, buckets),
        network=fingerprint(module.named_parameters()), omega=0.0, target_s=1.0, limits_met=True,
    )  # fmt: skip


def schedule_of(ranks: int, buckets: int, steps: int = 1) -> Schedule:
    """The actions that the contract in `foreplan.planner.precision.spec` names."""
    builder = ScheduleBuilder([f"cpu:{r}" for r in range(ranks)])
    work, group = HostLaunch(), tuple(range(ranks))
    for step in range(steps):
        for rank in range(ranks):
            builder.add("forward", rank, work)
            reduced = []
            for q in range(buckets):
                ready = builder.add("backward", rank, work, step=q)
                reduced.append(
                    builder.add(
                        "all_reduce", rank, Collective("all_reduce", 4, group, "fp32"), step=q,
                        dependencies=(ready,), resources=("link:all_reduce",),
                        rendezvous=step * buckets + q,
                    )
                )  # fmt: skip
            builder.add("optimizer", rank, work, dependencies=reduced)
    return builder.build()


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
