"""`verification_of`: from what was measured to the document: medians, errors, regret."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreplan.cost_models.costs import Collective
from foreplan.cost_models.timeline import Timeline
from foreplan.planner.plan import Plan
from foreplan.planner.prediction import RankPrediction
from foreplan.planner.times import Times
from foreplan.planner.verify.error_cause import error_cause
from foreplan.planner.verify.machine_share import machine_share
from foreplan.planner.verify.measured import computing
from foreplan.planner.verify.rounds import Measured
from foreplan.planner.verify.step_pace import step_pace
from foreplan.planner.verify.verification import (
    AgreementResult,
    CandidateResult,
    Item,
    Machine,
    Phase,
    RankResult,
    Verification,
)


def verification_of(
    plan: Plan,
    measured: Sequence[Measured],
    agreement: Sequence[AgreementResult],
    *,
    machine: Machine,
    rounds: int,
    tolerance: float,
    notes: Sequence[str],
) -> Verification:
    """Make the document.

    Args:
        plan: what was verified.
        measured: what came of each candidate, the chosen decision first.
        agreement: what the comparisons of results gave.
        machine: where it ran.
        rounds: timed rounds.
        tolerance: largest error that passes.
        notes: what a reader has to know.
    """
    candidates = tuple(_candidate(item) for item in measured)
    chosen = candidates[0]
    rivals = [c.measured_s for c in candidates[1:] if c.limits_met and c.measured_s is not None]
    regret = None
    speedup: dict[str, float] = {}
    if chosen.measured_s is not None:
        if rivals:
            regret = chosen.measured_s / min(*rivals, chosen.measured_s) - 1.0
        speedup = {
            c.name: c.measured_s / chosen.measured_s
            for c in candidates[1:]
            if c.measured_s is not None
        }
    accurate = chosen.error is not None and chosen.error <= tolerance
    timelines = measured[0].timelines
    return Verification(
        plan_digest=plan.digest,
        kind=plan.kind,
        backend=plan.verify.backend,
        machine=machine.model_copy(update={"devices": tuple(measured[0].devices)}),
        rounds=rounds,
        tolerance=tolerance,
        candidates=candidates,
        agreement=tuple(agreement),
        regret=regret,
        rank_correlation=_correlation(candidates),
        speedup=speedup,
        passed=accurate and all(item.passed for item in agreement),
        notes=tuple(notes),
        times=Times.of(timelines[median_round(timelines)]) if timelines else None,
        error_cause=error_cause(chosen, tolerance),
        machine_share=machine_share(chosen, tolerance),
    )


def median_round(timelines: Sequence[Timeline]) -> int:
    """The round whose total is the (lower) median."""
    order = sorted(range(len(timelines)), key=lambda k: timelines[k].makespan_s)
    return order[(len(order) - 1) // 2]


def relative_error(predicted: float | None, measured: float | None) -> float | None:
    """|predicted - measured| / measured, ``None`` where either is missing or nothing was run."""
    if predicted is None or measured is None or measured <= 0.0:
        return None
    return abs(predicted - measured) / measured


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation; ties share their mean rank; ``None`` where one side is flat."""
    ranks = []
    for values in (first, second):
        array = np.asarray(values, dtype=np.float64)
        below = (array[None, :] < array[:, None]).sum(axis=1)
        equal = (array[None, :] == array[:, None]).sum(axis=1)
        ranks.append(below + (equal - 1) / 2.0)
    a, b = (rank - rank.mean() for rank in ranks)
    scale = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return None if scale == 0.0 else float((a * b).sum()) / scale


def _correlation(candidates: Sequence[CandidateResult]) -> float | None:
    pairs = [
        (c.predicted_s, c.measured_s)
        for c in candidates
        if c.predicted_s is not None and c.measured_s is not None
    ]
    return None if len(pairs) < 3 else spearman([p for p, _ in pairs], [m for _, m in pairs])


def _candidate(item: Measured) -> CandidateResult:
    candidate = item.candidate
    predicted = None if candidate.predicted is None else candidate.predicted.total_s
    common = CandidateResult(
        name=candidate.name, role=candidate.role, limits_met=candidate.limits_met,
        predicted_s=predicted, failure=None if item.failure is None else str(item.failure),
    )  # fmt: skip
    if item.failure is not None or not item.timelines:
        return common
    totals = [timeline.makespan_s for timeline in item.timelines]
    median = float(np.median(totals))
    low, high = (float(q) for q in np.quantile(totals, [0.1, 0.9]))
    return common.model_copy(
        update={
            "measured_s": median, "p10_s": low, "p90_s": high, "rounds_s": tuple(totals),
            "error": relative_error(predicted, median),
            "ranks": tuple(_rank(item, rank) for rank in range(len(candidate.ranks))),
            **_pace(item, predicted, median),
        }
    )  # fmt: skip


def _pace(item: Measured, predicted: float | None, measured: float) -> dict[str, float | None]:
    """The machine's pace in the rounds of a candidate, and the error at it; {} if not known."""
    labels = [rank.label for rank in item.candidate.ranks]
    found = [
        step_pace(timeline, [paces[label] for label in labels])
        for timeline, paces in zip(item.timelines, item.pace, strict=False)
        if all(label in paces for label in labels)
    ]
    if not found:
        return {}
    pace = float(np.median(found))
    low, high = (float(q) for q in np.quantile(found, [0.1, 0.9]))
    at_pace = None if predicted is None else predicted * pace
    return {
        "pace": pace, "pace_p10": low, "pace_p90": high,
        "error_at_pace": relative_error(at_pace, measured),
    }  # fmt: skip


def _rank(item: Measured, rank: int) -> RankResult:
    candidate = item.candidate
    predicted: RankPrediction | None = None
    if candidate.predicted is not None and candidate.predicted.ranks:
        ranks = candidate.predicted.ranks
        # Fewer than run where one of the schedule stands for several that work together.
        predicted = ranks[rank * len(ranks) // len(candidate.ranks)]
    expected = None if predicted is None else predicted.compute_s
    busy = float(np.median([timeline.busy_s()[rank] for timeline in item.timelines]))
    label = candidate.ranks[rank].label
    paces = [paces[label] for paces in item.pace if label in paces]
    return RankResult(
        device=label,
        predicted_s=expected,
        measured_s=busy,
        error=relative_error(expected, busy),
        phases=_phases(item.timelines, rank, predicted),
        memory=_items(item.memory[rank], predicted),
        held_bytes=item.held[rank],
        pace=float(np.median(paces)) if paces else None,
    )


def _phases(
    timelines: Sequence[Timeline], rank: int, predicted: RankPrediction | None
) -> tuple[Phase, ...]:
    schedule = timelines[0].schedule
    mine = computing(schedule) & (schedule.rank == rank)
    expected = {} if predicted is None else predicted.phase_s
    phases = []
    for op in dict.fromkeys(schedule.ops[o] for o in schedule.op[mine]):
        seconds = float(np.median([timeline.total_s(op)[rank] for timeline in timelines]))
        wanted = expected.get(op)
        works = schedule.work[mine & (schedule.op == schedule.ops.index(op))]
        # What exchange takes from computation is an action of its own in a plan alone; in a run
        # other actions last longer for it.
        planned = all(isinstance(schedule.works[w], Collective) for w in works)
        phases.append(
            Phase(
                op=op, predicted_s=wanted, measured_s=None if planned else seconds,
                error=None if planned else relative_error(wanted, seconds),
            )
        )  # fmt: skip
    return tuple(phases)


def _items(held: dict[str, int], predicted: RankPrediction | None) -> tuple[Item, ...]:
    expected = {} if predicted is None else predicted.memory_bytes
    return tuple(
        Item(item=name, predicted_bytes=expected.get(name), held_bytes=held.get(name))
        for name in dict.fromkeys([*expected, *held])
    )
