"""`compare`, `phases_of`: what was simulated of traffic against what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from foreplan.planner.serving.pricing import DECODE, PREFILL
from foreplan.planner.serving.traffic_replay import Replay
from foreplan.planner.traffic_verification import TrafficFigure, TrafficPhase


def compare(
    simulated: Mapping[str, float], at_pace: Mapping[str, float] | None,
    measured: Sequence[Mapping[str, float]],
) -> tuple[TrafficFigure, ...]:  # fmt: skip
    """Figures side by side.

    Args:
        simulated: by the plan's costs.
        at_pace: the same at the machine's pace, if that is known.
        measured: of every round.
    """
    found = []
    for name, value in simulated.items():
        if name == "requests":  # the same in every run
            continue
        rounds = [figures[name] for figures in measured]
        middle = float(np.median(rounds))
        paced = None if at_pace is None else at_pace[name]
        found.append(
            TrafficFigure(
                name=name, simulated=value, at_pace=paced, measured=middle, low=min(rounds),
                high=max(rounds), error=_error(value, middle),
                error_at_pace=None if paced is None else _error(paced, middle),
            )
        )  # fmt: skip
    return tuple(found)


def phases_of(rounds: Sequence[tuple[Replay, Replay]]) -> tuple[TrafficPhase, ...]:
    """What the passes of all rounds took and what they cost, by device and phase.

    Args:
        rounds: each as measured, and priced.
    """
    found = []
    schedule = rounds[0][0].timeline.schedule
    for rank, device in enumerate(schedule.devices):
        for op in (PREFILL, DECODE):
            took, cost = (
                np.concatenate([_seconds(round_[k], rank, op) for round_ in rounds]) for k in (0, 1)
            )
            if len(took):
                measured, priced = float(took.mean()), float(cost.mean())
                found.append(
                    TrafficPhase(
                        device=device, op=op, passes=len(took), priced_s=priced,
                        measured_s=measured, error=priced / measured - 1.0,
                    )
                )  # fmt: skip
    return tuple(found)


def _seconds(replay: Replay, rank: int, op: str) -> np.ndarray:
    timeline, schedule = replay.timeline, replay.timeline.schedule
    if op not in schedule.ops:
        return np.zeros(0)
    mine = (schedule.rank == rank) & (schedule.op == schedule.ops.index(op))
    seconds: np.ndarray = timeline.end_s[mine] - timeline.start_s[mine]
    return seconds


def _error(simulated: float, measured: float) -> float | None:
    return simulated / measured - 1.0 if measured else None
