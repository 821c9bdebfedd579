"""`PlannerReplan`: ask the planner again, at prices that ranks were seen to have while training.

    replan = PlannerReplan(problem, decision, rank)
    adjust = LiveAdjustment(model, replan, period=50)

A rank that takes 1.4 times what its present precisions were priced at has all its prices multiplied
by 1.4; then the same search as before the training decides for all ranks together, within the
target that these prices allow. Ranks reach the same decision without a message of their own,
because they compute it from the same exchanged times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from foreplan.cost_models.costs import (
    Collective,
    CostBook,
    CostSource,
    Estimate,
    HostSource,
    HostWait,
    Work,
)
from foreplan.errors import SpecError
from foreplan.planner.base import Problem
from foreplan.planner.precision.indicator import omega_table
from foreplan.planner.precision.search import PrecisionSearch
from foreplan.planner.precision.situation import Situation
from foreplan.planner.precision.spec import PrecisionDecision, PrecisionWorkload


class _Slowed:
    """A source whose prices of a device are multiplied; links stay as they are."""

    def __init__(self, source: CostSource, factors: Mapping[str, float]) -> None:
        self._source, self._factors = source, factors

    def estimate(self, work: Work, device: str) -> Estimate | None:
        """The source's price, multiplied."""
        found = self._source.estimate(work, device)
        if found is None or isinstance(work, Collective):
            return found
        return found.times(self._factors.get(device, 1.0))

    def issuing(self, work: HostWait, device: str) -> Estimate | None:
        """What the source says of a host, multiplied."""
        source = self._source
        found = source.issuing(work, device) if isinstance(source, HostSource) else None
        return None if found is None else found.times(self._factors.get(device, 1.0))


class PlannerReplan:
    """See the module; a `foreplan.planner.precision.execution.adjust.Replan`.

    Args:
        problem: that the plan solves, with prices.
        decision: in force at the start.
        rank: whose variants are returned.
        margin: relative change of a rank's slowness against the others that is left alone.

    Attributes:
        decision: in force.
        factors: measured over priced seconds that it was made for, by rank; the first call sets
            them where no plan changes.

    Raises:
        SpecError: a decision of another problem, or no such rank.
        MissingDataError: an operator without a price.
    """

    def __init__(
        self, problem: Problem[PrecisionWorkload], decision: PrecisionDecision, rank: int, *,
        margin: float = 0.1,
    ) -> None:  # fmt: skip
        self._priced = Situation(problem, apart=True)
        ranks = len(self._priced.ranks)
        if not 0 <= rank < ranks:
            raise SpecError("rank", got=rank, expected=f"0..{ranks - 1}")
        self._problem, self._rank, self._margin = problem, rank, margin
        self._omega = omega_table(
            self._priced.task, self._priced.graph, problem.workload, problem.seed
        )
        self._priced.choices(decision)  # of this network, cluster and workload
        self.decision = decision
        self.factors: tuple[float, ...] = (1.0,) * ranks

    def __call__(self, seconds: Sequence[float]) -> dict[str, str] | None:
        """This rank's variants at the present times, or ``None`` where they stay.

        Args:
            seconds: of forward and backward pass of a step, by rank.
        """
        factors = self._slowness(seconds)
        if all(
            abs(new / old - 1.0) <= self._margin
            for new, old in zip(_relative(factors), _relative(self.factors), strict=True)
        ):
            return None
        before, self.decision = self.decision, self._decide(factors)
        self.factors = factors
        mine = self.decision.workers[self._rank].operators
        return None if mine == before.workers[self._rank].operators else dict(mine)

    def _slowness(self, seconds: Sequence[float]) -> tuple[float, ...]:
        """Measured over priced seconds of every rank's present precisions."""
        found = []
        choices = self._priced.choices(self.decision)
        for measured, device, choice in zip(seconds, self._priced.devices, choices, strict=True):
            forward, backward = device.seconds(choice)
            found.append(measured / (forward + float(backward.sum())))
        return tuple(found)

    def _decide(self, factors: Sequence[float]) -> PrecisionDecision:
        labels = [rank.label for rank in self._priced.ranks]
        by_label = dict(zip(labels, factors, strict=True))
        costs = CostBook([_Slowed(source, by_label) for source in self._problem.costs.sources])
        now = Situation(
            dataclasses.replace(self._problem, costs=costs), captured=self._priced, apart=True
        )
        search = PrecisionSearch(now, self._omega)
        found = search.run()
        return now.decision(found.choices, self._omega, search.target_s)


def _relative(factors: Sequence[float]) -> list[float]:
    """Slowness against the fastest: a machine that is slower as a whole changes no plan."""
    least = min(factors)
    return [factor / least for factor in factors]
