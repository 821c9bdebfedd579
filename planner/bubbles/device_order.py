"""`device_orders`: which devices of a mixed cluster the ranks of a pipeline may take.

A pipeline rank takes a block of ``dp x tp`` devices that follow each other in the cluster. On
unlike devices it matters which: the first and the last rank have embedding and head beside their
layers, first ranks hold more activations, and links between blocks differ. Blocks of like devices
are interchangeable, so that only orders of unlike ones are different.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from foreplan.datasets.cluster import Cluster
from foreplan.planner.bubbles.spec import BackbonePlan

#: Orders up to which all are tried; beyond, only those that keep like blocks together. Assumed: a
#: backbone's step is simulated for each.
_ALL = 24
#: Kinds of blocks whose orders are tried then, at most.
_KINDS = 4


def device_orders(cluster: Cluster, plan: BackbonePlan) -> list[tuple[int, ...]]:
    """Orders of a cluster's blocks that differ, the cluster's own first; one where all are alike.

    Args:
        cluster: at least as many devices as the layout takes.
        plan: the layout.

    Returns:
        `BackbonePlan.device_order` of each.
    """
    width = plan.dp * plan.tp
    ranks = cluster.ranks()[: plan.pp * width]
    blocks = [
        tuple((str(r.name), r.profile, r.memory_bytes) for r in ranks[at : at + width])
        for at in range(0, len(ranks), width)
    ]
    kinds = sorted(set(blocks), key=blocks.index)
    members = [[n for n, block in enumerate(blocks) if block == kind] for kind in kinds]
    own = tuple(range(plan.pp))
    if len(kinds) == 1:
        return [own]
    some = list(itertools.islice(_different([len(m) for m in members]), _ALL + 1))
    if len(some) > _ALL:
        some = [
            tuple(kind for kind in order for _ in members[kind])
            for order in itertools.islice(
                itertools.permutations(range(len(kinds))), _ALL if len(kinds) <= _KINDS else 1
            )
        ]
    orders = []
    for order in some:
        left = [iter(group) for group in members]
        orders.append(tuple(next(left[kind]) for kind in order))
    return [own, *(order for order in dict.fromkeys(orders) if order != own)]


def _different(counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every different order of so many things of each kind."""
    if not any(counts):
        yield ()
    for kind, count in enumerate(counts):
        if count:
            rest = [c - (n == kind) for n, c in enumerate(counts)]
            for order in _different(rest):
                yield (kind, *order)
