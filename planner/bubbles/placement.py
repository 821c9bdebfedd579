"""Where encoders may lie: numbers of stages, pipelines, units; colocated with the backbone.

Every device holds a share of the backbone and a share of each encoder (Optimus, section 4.1). With
``PP_e`` encoder stages, ``PP_e`` dividing the backbone's ``PP_l``, and the backbone's tensor
parallelism, one backbone pipeline holds ``m = PP_l / PP_e`` replicas of the encoder, each on
consecutive ranks, so that ``DP_e = m DP_l``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from foreplan.errors import SpecError
from foreplan.planner.bubbles.cuts import even_cuts
from foreplan.planner.bubbles.decision import EncoderPlan
from foreplan.planner.bubbles.spec import BackbonePlan
from foreplan.planner.bubbles.towers import Tower

#: Pieces in which an encoder stage's sharded parameters are gathered and its gradients reduced, so
#: that both overlap with computation.
BUCKETS = 8


def colocated_ranks(plan: BackbonePlan, stages: int) -> tuple[tuple[int, ...], ...]:
    """Ranks of each encoder pipeline, ``[pipeline][stage]``.

    Raises:
        SpecError: stages that do not divide the backbone's ranks.
    """
    if plan.pp % stages:
        raise SpecError("encoder stages", got=stages, expected=f"a divisor of pp = {plan.pp}")
    return tuple(tuple(range(first, first + stages)) for first in range(0, plan.pp, stages))


def even_stages(tower: Tower, stages: int) -> tuple[tuple[int, int], ...]:
    """Encoder stages of equal layers, or of one more in the first ones.

    Raises:
        SpecError: fewer layers than stages.
    """
    if tower.layers < stages:
        raise SpecError(
            f"encoder {tower.name}", got=f"{tower.layers} layers in {stages} stages",
            expected="a layer for each stage",
        )  # fmt: skip
    return tuple(itertools.pairwise(even_cuts(tower.layers, stages)))


def unit_cuts(stages: Sequence[tuple[int, int]], unit_layers: float | None) -> tuple[int, ...]:
    """Cuts in half layers: units of a size, the last of a stage perhaps smaller.

    Args:
        stages: layers of each stage.
        unit_layers: layers of a unit; ``None`` for `BUCKETS` units a stage, as large as still
            allows its communication to overlap.
    """
    cuts = [0]
    for start, end in stages:
        halves = -(-2 * (end - start) // BUCKETS) if unit_layers is None else round(2 * unit_layers)
        size = max(1, halves)
        cuts += [*range(2 * start + size, 2 * end, size), 2 * end]
    return tuple(cuts)


def encoder_plan(
    tower: Tower,
    plan: BackbonePlan,
    *,
    stages: int,
    unit_layers: float | None,
    slots: Sequence[int],
) -> EncoderPlan:
    """A colocated encoder.

    Args:
        tower: the encoder.
        plan: the backbone's layout.
        stages: of each encoder pipeline.
        unit_layers: layers of a unit; see `unit_cuts`.
        slots: pipeline of each micro-batch.

    Raises:
        SpecError: fewer layers than stages, stages that do not divide the backbone's ranks.
    """
    cuts = even_stages(tower, stages)
    return EncoderPlan(
        name=tower.name,
        tp=plan.tp,
        stages=cuts,
        units=unit_cuts(cuts, unit_layers),
        ranks=colocated_ranks(plan, stages),
        slots=tuple(slots),
    )


def whole_encoder(tower: Tower, tp: int, microbatches: int) -> EncoderPlan:
    """An encoder in one stage on the backbone's first rank.

    Args:
        tower: the encoder.
        tp: its tensor parallelism.
        microbatches: all of which pass through that one pipeline.
    """
    whole = ((0, tower.layers),)
    return EncoderPlan(
        name=tower.name,
        tp=tp,
        stages=whole,
        units=unit_cuts(whole, None),
        ranks=((0,),),
        slots=(0,) * microbatches,
    )
