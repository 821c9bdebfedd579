"""What others do with the encoders: as work of the first pipeline stages, or before and after.

- *first stage* ("Megatron-LM"): the encoders are work of rank 0, in front of stage 0;
- *balanced* ("Megatron-LM balanced", Optimus section 5.1): encoder and backbone are one chain of
  layers, cut into virtual stages so that the slowest is fastest (dynamic programming; one encoder);
- *three-phase* (Megatron-LM ``colocated_schedule``, Kimi K2.5): all forwards of the encoders on all
  ranks, then the backbone, then all backwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from foreplan.cost_models.costs import CostBook
from foreplan.cost_models.pipeline import pipeline_order
from foreplan.errors import SpecError
from foreplan.planner.bubbles.actions import Step, write_order
from foreplan.planner.bubbles.backbone import (
    backbone_orders,
    forwards_first,
    layer_seconds,
    schedule_name,
    seconds_by_stage,
)
from foreplan.planner.bubbles.cuts import min_max_cuts
from foreplan.planner.bubbles.decision import BackboneStage, BubblesDecision, EncoderPlan
from foreplan.planner.bubbles.placement import encoder_plan, unit_cuts, whole_encoder
from foreplan.planner.bubbles.training_step import TrainingStep


def first_stage(step: TrainingStep, bare: BubblesDecision) -> BubblesDecision:
    """Every encoder on rank 0, right before and behind stage 0.

    Args:
        step: works under the layout.
        bare: the backbone alone.
    """
    count = bare.microbatches
    plans = tuple(whole_encoder(tower, step.plan.tp, count) for tower in step.encoders)
    orders = backbone_orders(bare.schedule, step.plan, count)
    gradient = "I" if any(item.op == "I" for item in orders[0]) else "B"
    mine: list[Step] = []
    for item in orders[0]:
        if item.stage == 0 and item.op == "F":
            mine += _units(plans, "F", item.microbatch)
        mine.append(item)
        if item.stage == 0 and item.op == gradient:
            mine += _trained(step, _units(plans, "B", item.microbatch))
    return bare.model_copy(
        update={
            "encoders": plans,
            "orders": (write_order(mine), *bare.orders[1:]),
            "fill": "unfilled",
        }
    )


def three_phase(step: TrainingStep, bare: BubblesDecision, stages: int) -> BubblesDecision:
    """All encoder forwards, the backbone, all encoder backwards, on every rank.

    Args:
        step: works under the layout.
        bare: the backbone alone.
        stages: of each encoder pipeline.

    Raises:
        SpecError: fewer layers than stages of an encoder.
    """
    count, pipelines = bare.microbatches, step.plan.pp // stages
    slots = [mb % pipelines for mb in range(count)]
    plans = tuple(
        encoder_plan(tower, step.plan, stages=stages, unit_layers=None, slots=slots)
        for tower in step.encoders
    )
    texts = []
    for rank, text in enumerate(bare.orders):
        pipeline, stage = divmod(rank, stages)
        mine = [mb for mb in range(count) if slots[mb] == pipeline]
        before = [
            x
            for mb in mine
            for plan in range(len(plans))
            for x in _stage_units(plans[plan], "F", mb, stage, plan)
        ]
        after = [
            x
            for mb in mine
            for plan in reversed(range(len(plans)))
            for x in _stage_units(plans[plan], "B", mb, stage, plan)
        ]
        words = (write_order(before), text, write_order(_trained(step, after)))
        texts.append(" ".join(word for word in words if word))
    return bare.model_copy(
        update={"encoders": plans, "orders": tuple(texts), "fill": "three-phase"}
    )


def balanced(
    step: TrainingStep, costs: CostBook, name: str, microbatches: int, chunks: int,
    cuts: Sequence[int] | None = None,
) -> BubblesDecision:  # fmt: skip
    """One chain of encoder and backbone layers, cut by dynamic programming.

    Args:
        step: works under the layout.
        costs: prices of layers.
        name: pipeline schedule.
        microbatches: of a step.
        chunks: virtual stages of a rank.
        cuts: of the chain; those whose longest part is shortest if left out.

    Raises:
        SpecError: several encoders, fewer layers than virtual stages, a cut that leaves the
            backbone without a stage of its own.
    """
    if len(step.encoders) > 1:
        raise SpecError(
            "balanced", got=f"{len(step.encoders)} encoders", expected="one, to make one chain"
        )
    tower, plan = step.encoders[0], step.plan
    count = plan.pp * chunks
    if cuts is None:
        cuts = min_max_cuts(seconds_by_stage(chain_seconds, step, costs, count), count)
    spans = list(itertools.pairwise(cuts))
    split = tower.layers
    encoding = [c for c, (start, _) in enumerate(spans) if start < split]
    own = [c for c, (_, end) in enumerate(spans) if end > split]
    stages = tuple((spans[c][0], min(spans[c][1], split)) for c in encoding)
    encoder = EncoderPlan(
        name=tower.name, tp=plan.tp, stages=stages, units=unit_cuts(stages, None),
        ranks=(tuple(c % plan.pp for c in encoding),), slots=(0,) * microbatches,
    )  # fmt: skip
    orders = []
    chosen = schedule_name(name, chunks)  # type: ignore[arg-type]
    passes = pipeline_order(chosen, stages=plan.pp, microbatches=microbatches, chunks=chunks)
    letters = {"F": "F", "BW": "B", "B": "I", "W": "W"}
    trained = not step.encoder(0).frozen
    for order in passes:
        mine: list[Step] = []
        for op, c, mb in order:
            backbone = [Step(letters[op], mb, own.index(c))] if c in own else []
            letter = "F" if op == "F" else "B"
            units = _stage_units(encoder, letter, mb, c) if c in encoding else []
            if op == "F":
                mine += units + backbone
            else:
                mine += backbone + (units if trained and op in ("BW", "B") else [])
        orders.append(mine)
    return BubblesDecision(
        plan=plan.model_copy(update={"chunks": chunks}),
        schedule=chosen,
        microbatches=microbatches,
        warmup=tuple(forwards_first(order) for order in orders),
        stages=tuple(
            BackboneStage(
                rank=c % plan.pp, start=max(spans[c][0], split) - split, end=spans[c][1] - split
            )
            for c in own
        ),
        encoders=(encoder,),
        orders=tuple(write_order(order) for order in orders),
        fill="unfilled",
    )


def chain_busy_s(step: TrainingStep, costs: CostBook, microbatches: int, chunks: int) -> float:
    """What the busiest rank computes under `balanced` in its cuts by time.

    Raises:
        SpecError: fewer layers than virtual stages.
        MissingDataError: a pass without a price.
    """
    pp = step.plan.pp
    seconds = seconds_by_stage(chain_seconds, step, costs, pp * chunks)
    busy = [0.0] * pp
    for c, (start, end) in enumerate(itertools.pairwise(min_max_cuts(seconds, pp * chunks))):
        busy[c % pp] += float(seconds[c, start:end].sum())
    return microbatches * max(busy)


def chain_seconds(step: TrainingStep, costs: CostBook, device: str) -> list[float]:
    """Forward and backward of every layer of the first encoder, then of the backbone.

    Raises:
        MissingDataError: a pass without a price.
    """
    found = []
    ops = ("F",) if step.encoder(0).frozen else ("F", "B")
    for layer in range(step.encoders[0].layers):
        halves = 2 * layer, 2 * layer + 2
        works = [step.unit(0, step.plan.tp, *halves, op, bare=False) for op in ops]
        found.append(sum(costs.cost(work, device).mean_s for work in works))
    return found + layer_seconds(step, costs, device)


def _units(plans: Sequence[EncoderPlan], op: str, microbatch: int) -> list[Step]:
    """Every unit of a micro-batch in the order in which a rank runs them."""
    found = [
        Step(op, microbatch, encoder=e, unit=unit)
        for e, plan in enumerate(plans)
        for unit in range(len(plan.units) - 1)
    ]
    return found if op == "F" else found[::-1]


def _stage_units(
    plan: EncoderPlan, op: str, microbatch: int, stage: int, encoder: int = 0
) -> list[Step]:
    found = [Step(op, microbatch, encoder=encoder, unit=u) for u in plan.stage_units(stage)]
    return found if op == "F" else found[::-1]


def _trained(step: TrainingStep, items: Iterable[Step]) -> list[Step]:
    return [item for item in items if not step.encoder(item.encoder).frozen]
