"""`Prediction`: what the simulator says about a decision, as a plan holds it, rank by rank."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from foreplan.datasets.specs import StrictModel
from foreplan.planner.times import Size

#: Ends of an interval, their mean and shares may be off by as much as sums of floats are.
ROUNDING = 1e-9
#: A time or a share of a document; what is edited into nonsense is refused.
Seconds = Annotated[float, Field(ge=-ROUNDING)]
Share = Annotated[float, Field(ge=-ROUNDING, le=1 + ROUNDING)]


class RankPrediction(StrictModel):
    """One rank's share of the predicted run.

    Attributes:
        device: its device.
        compute_s, communication_s, bubble_s: where its time goes; they add up to the total.
        cause_s: compute time by operator.
        phase_s: compute time by action (``prefill``, ``decode``, ``F``).
        memory_bytes: bytes by item at the peak.
        capacity_bytes: what it may use, ``None`` where unknown.
    """

    device: str
    compute_s: Seconds
    communication_s: Seconds
    bubble_s: Seconds
    cause_s: dict[str, Seconds] = Field(default_factory=dict)
    phase_s: dict[str, Seconds] = Field(default_factory=dict)
    memory_bytes: dict[str, Size] = Field(default_factory=dict)
    capacity_bytes: Size | None = None


class Prediction(StrictModel):
    """What the simulator says about a decision.

    Attributes:
        total_s: makespan of the schedule.
        low_s, high_s: the same with every price at the low or high end of its interval; the total
            lies between them.
        metrics: the planner's own figures.
        ranks: one entry a rank.
    """

    total_s: Annotated[float, Field(ge=0)]
    low_s: Annotated[float, Field(ge=0)]
    high_s: Annotated[float, Field(ge=0)]
    metrics: dict[str, float] = Field(default_factory=dict)
    ranks: tuple[RankPrediction, ...] = ()

    @field_validator("low_s")
    @classmethod
    def _below_the_total(cls, value: float, info: ValidationInfo) -> float:
        total_s = info.data.get("total_s")
        if total_s is not None and value > total_s * (1 + ROUNDING):
            raise ValueError(f"at most total_s = {total_s}")
        return value

    @field_validator("high_s")
    @classmethod
    def _above_the_total(cls, value: float, info: ValidationInfo) -> float:
        total_s = info.data.get("total_s")
        if total_s is not None and value < total_s * (1 - ROUNDING):
            raise ValueError(f"at least total_s = {total_s}")
        return value
