"""`contention`: how much ranks of a host slow each other down, and in which share of their time.

Measured by ``foreplan profile`` (`foreplan.datasets.ranks.contention`,
`foreplan.datasets.ranks.together`).
"""

from __future__ import annotations

import bisect

import numpy as np

from foreplan.cost_models.costs import Copy, CostBook, Lag, Segment, Work
from foreplan.cost_models.simulator import Contention
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.program import Program
from foreplan.datasets.tier import ContentionKind


def contention(
    cluster: Cluster, ranks: tuple[int, ...], occupied: tuple[int, ...] = (),
    kind: ContentionKind = "memory",
) -> Contention | None:  # fmt: skip
    """Measured slowdown between the ranks of a schedule; ``None`` where nothing was measured.

    Args:
        cluster: knows hosts and measured factors.
        ranks: cluster rank of each rank of the schedule.
        occupied: cluster ranks that are at work, of which each of ``ranks`` stands for those from
            itself to the next; only themselves if left out.
        kind: what the ranks do; see `contended`.
    """
    every = cluster.ranks()
    hosts = [every[r].host for r in ranks]
    names = sorted(set(hosts))
    processes = [1] * len(ranks)
    if len(occupied) > len(ranks):
        first = sorted(ranks)
        for other in set(occupied) - set(ranks):
            here = ranks.index(first[max(0, bisect.bisect(first, other) - 1)])
            # A replica on another host has neighbours of its own, as many as here.
            processes[here] += every[other].host == hosts[here]
    # One table serves all hosts: the worst of them, so that a prediction is not too rosy.
    known = {1: 1.0}
    for together in range(2, sum(processes) + 1):
        # Prices are of one rank alone: what it takes then is no slowdown.
        measured = [
            factor / (cluster.slowdown(host, kind, 1) or 1.0)
            for host in names
            if (factor := cluster.slowdown(host, kind, together)) is not None
        ]
        if measured:
            known[together] = max(1.0, *measured)
    factors = np.interp(range(1, max(known) + 1), list(known), list(known.values())).tolist()
    if len(factors) < 2 or max(factors) == 1.0:
        return None
    return Contention(tuple(names.index(h) for h in hosts), tuple(factors), tuple(processes))


def contended(cluster: Cluster) -> ContentionKind:
    """What ranks that train contend in: passes where those were timed together, else memory."""
    return "training" if any(c.kind == "training" for c in cluster.contention) else "memory"


def pressure(costs: CostBook, device: str, work: Work, kind: ContentionKind) -> float:
    """Share of a work's time in which it contends with other ranks of its host, 0..1."""
    return (compute_share if kind == "training" else memory_share)(costs, device, work)


def compute_share(costs: CostBook, device: str, work: Work) -> float:
    """Share of a work's time that its programs take, 0..1; the rest is what ranks send each other.

    Waiting for the slowest of several that compute counts as computing. Without a price the share
    is 0.
    """
    if isinstance(work, Program):
        return 1.0
    if not isinstance(work, Segment) or not costs.can_price(work, device):
        return 0.0
    total = bound = 0.0
    for part, count in work.parts:
        seconds = costs.cost(part, device).mean_s * count
        total += seconds
        bound += seconds if isinstance(part, Program | Lag) else 0.0
    return bound / total if total else 0.0


def memory_share(costs: CostBook, device: str, work: Work) -> float:
    """Share of a segment's time that its memory traffic alone would take, 0..1.

    The bandwidth is what the cost book says of a large copy on the device; without a price for one
    the share is 0, and ranks of a host are taken not to slow each other down.
    """
    probe = Copy(1 << 28)
    if not isinstance(work, Segment) or not costs.can_price(probe, device):
        return 0.0
    # A copy reads and writes: it moves its payload twice.
    seconds_per_byte = costs.cost(probe, device).mean_s / (2 * probe.bytes)
    total = bound = 0.0
    for part, count in work.parts:
        if isinstance(part, Program):
            mean = costs.cost(part, device).mean_s
            total += mean * count
            bound += min(part.bytes * seconds_per_byte, mean) * count
    return bound / total if total else 0.0
