"""LinkSource: prices of communication from a cluster's tiers.

Measured where the tier has a fit for this collective over this many ranks (for one that nothing is
computed beside, one of its own if there is): ``alpha + beta * payload``. Otherwise from the latency
``a`` and bandwidth ``b`` of one message, by the ring algorithms' formulas over ``n`` ranks (Thakur,
Rabenseifner, Gropp, IJHPCA 19(1), 2005; payload as in `foreplan.datasets.tier`), and then the
source is ``theory``:

==================  =============================================
p2p                 ``a + m / b``
broadcast           ``(n - 1) a + m / b`` (pipelined along the ring)
all_reduce          ``2 (n - 1) a + 2 (n - 1) / n * m / b``
all_gather          ``(n - 1) a + (n - 1) / n * m / b``
reduce_scatter      ``(n - 1) a + (n - 1) / n * m / b``
all_to_all          ``(n - 1) a + (n - 1) / n * m / b``
==================  =============================================

A group whose pairs lie on several tiers runs at the pace of its slowest.
"""

from __future__ import annotations

from foreplan.cost_models.costs import Collective, Estimate, Work
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.tier import Backend, CollectiveFit, Tier

#: A fit's 90 % interval over its median residual, if residuals are normal (1.645 / 0.6745).
_RESIDUAL_TO_INTERVAL = 2.44
#: Interval of a formula (assumed): libraries are up to twice as fast and four times as slow; gloo's
#: collectives miss the ring formulas by factors of that size.
_THEORY_LOW, _THEORY_HIGH = 0.5, 4.0


class LinkSource:
    """Prices `Collective` work; everything else is ``None``.

    Args:
        cluster: ranks and tiers.
        backend: only figures of this library, or of none in particular.
    """

    def __init__(self, cluster: Cluster, backend: Backend | None = None) -> None:
        self.cluster = cluster
        self.backend = backend

    def estimate(self, work: Work, device: str) -> Estimate | None:
        """Price a collective; ``None`` if its ranks do not exist.

        Raises:
            MissingDataError: no tier joins two of its ranks; names them.
        """
        if not isinstance(work, Collective):
            return None
        group = tuple(dict.fromkeys(work.group))
        count = len(self.cluster.ranks())
        if len(group) < 2:
            return Estimate.exact(0.0, "theory")  # nothing to send
        if not all(0 <= rank < count for rank in group):
            return None
        tiers = self.cluster.links(group, self.backend)
        found = [_on_tier(work, len(group), tier) for tier in tiers]
        if any(estimate is None for estimate in found):
            return None
        return max((e for e in found if e is not None), key=lambda e: e.mean_s)


def _on_tier(work: Collective, ranks: int, tier: Tier) -> Estimate | None:
    fits = (*tier.waited, *tier.collectives) if work.waited else tier.collectives
    fit = next((f for f in fits if f.kind == work.kind and f.ranks == ranks), None)
    if fit is not None:
        return _fitted(fit, work.bytes)
    seconds = _ring_seconds(work.kind, work.bytes, ranks, tier)
    if seconds is None:
        return None
    return Estimate(seconds, _THEORY_LOW * seconds, _THEORY_HIGH * seconds, "theory")


def _fitted(fit: CollectiveFit, payload_bytes: int) -> Estimate:
    seconds = fit.seconds(payload_bytes)
    half = _RESIDUAL_TO_INTERVAL * fit.residual
    return Estimate(seconds, seconds / (1.0 + half), seconds * (1.0 + half), "interpolated")


def _ring_seconds(kind: str, payload_bytes: int, ranks: int, tier: Tier) -> float | None:
    latency, transfer = tier.latency_s, payload_bytes / tier.bandwidth_bytes_per_s
    steps = ranks - 1
    share = steps / ranks
    if kind == "p2p":
        return latency + transfer
    if kind == "broadcast":
        return steps * latency + transfer
    if kind == "all_reduce":
        return 2 * steps * latency + 2 * share * transfer
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return steps * latency + share * transfer
    return None
