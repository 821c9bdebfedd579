"""`Confidence`: how sure a plan's choice is, as its document says it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from foreplan.datasets.specs import StrictModel
from foreplan.planner.prediction import Share


class Measurement(StrictModel):
    """A price that is worth being measured.

    Attributes:
        program: operator and variant, or the kind of a transfer.
        device: device or link.
        source: where most of today's price comes from.
        low, high: ends of its 90 % interval, as shares of the price.
        probability_best: chance that the best decision is taken once this price, and those before
            it in the list, are known; expected over what may be measured.
    """

    program: str
    device: str
    source: str
    low: Annotated[float, Field(ge=0)]
    high: Annotated[float, Field(ge=0)]
    probability_best: Share


class Confidence(StrictModel):
    """How sure the choice is; see `foreplan.planner.confidence`.

    Attributes:
        probability_best: share of draws, all prices resampled from their intervals, in which no
            other decision is better and the time limit, if there is one, is met.
        in_time: share of draws in which the plan meets the planner's time limit; ``None`` without
            one. Where a faster world lets a better decision be in time too, the plan is in time and
            not the best.
        draws: how many draws; 0 where there was nothing to compare with.
        runner_up: the decision that wins most of the others, if any.
        share: share of draws that each other decision wins, by name. What is missing from 1: draws
            in which no decision meets the time limit.
        measure_next: up to two measurements that raise the chance most, the best first; none where
            none does.
    """

    probability_best: Share
    draws: Annotated[int, Field(ge=0)]
    in_time: Share | None = None
    runner_up: str | None = None
    share: dict[str, Share] = Field(default_factory=dict)
    measure_next: tuple[Measurement, ...] = ()

    @field_validator("measure_next", mode="before")
    @classmethod
    def _without_names(cls, value: Any) -> Any:
        # Plans of early versions named operators here that moved the comparison, without their
        # worth: they can still be read and run, and say nothing about measurements.
        items = tuple(value)
        return () if any(isinstance(item, str) for item in items) else items
