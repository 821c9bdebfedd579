"""`InStepSource`: prices of a training step's programs as a step meets them.

A profile times a program alone and on operands that no cache holds. Where ``foreplan profile`` has
also timed the programs of a pass behind one another (`foreplan.datasets.ranks.together`), prices
that come from the profile are corrected by what one rank took for them there, over their prices.
What ranks at work together take from each other on top is the simulator's
(`foreplan.planner.contention`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from foreplan.cost_models.costs import CostSource, Estimate, Work, first_answers
from foreplan.cost_models.sources.failed import regime
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.cluster_entry import Rank
from foreplan.datasets.kernels.training_programs import is_training
from foreplan.datasets.program import Program


class InStepFactor:
    """How much longer than by its profile a device takes for programs in a pass.

    Args:
        whole: of the pass.
        programs: of single programs of it.
    """

    def __init__(self, whole: float, programs: Mapping[Program, float]) -> None:
        self._whole, self._programs = whole, dict(programs)
        self._found: dict[Program, float] = {}

    def __call__(self, item: Program) -> float:
        """Of a program, or of the nearest of its kernel path, or else of the pass.

        Args:
            item: a training step's pass runs; 1 for any other.
        """
        if not is_training(item) or item.op == "optimizer_step":  # which is behind all passes
            return 1.0
        if item not in self._found:
            near = nearest(item, self._programs)
            self._found[item] = self._whole if near is None else self._programs[near]
        return self._found[item]

    @property
    def says_nothing(self) -> bool:
        """Whether every price stays as it is."""
        return self._whole == 1.0 and not self._programs


def in_step_factors(cluster: Cluster, *, issued: bool = False) -> dict[str, InStepFactor]:
    """Factors of a cluster's ranks, by their labels.

    A rank that was not timed itself has those of one that shares its profile, which they correct.

    Args:
        cluster: knows what ranks took for a pass.
        issued: operators are issued one by one. What GPUs took for recorded passes says nothing of
            that.
    """
    ranks = cluster.ranks()
    alike: dict[str, dict[tuple[str, str], Rank]] = defaultdict(dict)
    for rank in ranks:
        if rank.profile is not None:
            alike[rank.profile].setdefault((rank.host, str(rank.name)), rank)
    made: dict[tuple[str, str], InStepFactor] = {}
    for rank in ranks:
        if (rank.host, str(rank.name)) not in made:
            others = alike[rank.profile].values() if rank.profile is not None else ()
            known = [] if issued and rank.kernel_kind == "cuda" else [rank, *others]
            made[rank.host, str(rank.name)] = _of_first(cluster, known)
    return {rank.label: made[rank.host, str(rank.name)] for rank in ranks}


def _of_first(cluster: Cluster, ranks: Sequence[Rank]) -> InStepFactor:
    """Of the first whose programs were timed, or else of the first whose host's passes were."""
    whole: float | None = None
    for rank in ranks:
        known = cluster.measured_contention(rank.host, "training", 1)
        if known is None:
            continue
        own = {p.program(): p.factor for p in known.programs if p.device == str(rank.name)}
        if own:
            return InStepFactor(known.factors[1], own)
        whole = known.factors[1] if whole is None else whole
    return InStepFactor(1.0 if whole is None else whole, {})


def nearest(item: Program, known: Collection[Program]) -> Program | None:
    """The program itself, or that of its kernel path whose sizes differ by least factors.

    Args:
        item: what is looked for.
        known: among which; ``None`` if none of them has the path.
    """
    if item in known:
        return item

    def far(other: Program) -> float:
        return sum(abs(math.log(other.dims[name] / size)) for name, size in item.dims.items())

    return min((other for other in known if regime(other) == regime(item)), key=far, default=None)


class InStepSource:
    """Asks sources in order, and corrects what they say of a training step's programs.

    Args:
        sources: whose prices rest on a profile.
        factors: by rank label; others' prices stay.
    """

    def __init__(self, sources: Sequence[CostSource], factors: Mapping[str, InStepFactor]) -> None:
        self._sources, self._factors = tuple(sources), dict(factors)

    def estimate(self, work: Work, device: str) -> Estimate | None:
        """Price ``work`` on the rank labelled ``device``.

        Raises:
            FailedProgramError: it failed there.
        """
        for source in self._sources:
            found = source.estimate(work, device)
            if found is not None:
                factor = self._factors.get(device)
                if factor is None or not isinstance(work, Program):
                    return found
                return found.times(factor(work))
        return None

    def prepare(self, programs: Sequence[Program], device: str) -> None:
        """Let the sources price programs at once."""
        first_answers(self._sources, programs, device)
