"""`slowest`: which device stands for the block of devices that a pipeline rank takes.

The ``dp x tp`` devices of a block do alike work and wait for each other: lanes at every sum of a
pass, replicas where gradients meet. So a block takes what the slowest of its devices takes, and
that one is what a rank of the schedule is priced on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from foreplan.cost_models.costs import CostBook, Work
from foreplan.datasets.cluster_entry import Rank
from foreplan.datasets.device_name import DeviceName

#: Devices that compute alike: of one name and one profile.
DeviceKind = tuple[DeviceName, str | None]


def kind_of(rank: Rank) -> DeviceKind:
    """What decides how long a device takes."""
    return rank.name, rank.profile


def slowest(block: Sequence[Rank], layer: Sequence[Work], costs: CostBook) -> Rank:
    """The device that takes longest for a layer; of alike ones the first, which cost no price.

    A device without a price counts as the slowest, so that the price that lacks is said; where
    nothing has one, as in a rank's process, the first stands for all.

    Args:
        block: devices of a pipeline rank.
        layer: works that each of them does.
        costs: prices of the works.
    """
    kinds: dict[DeviceKind, Rank] = {}
    for rank in block:
        kinds.setdefault(kind_of(rank), rank)
    firsts = list(kinds.values())
    if len(firsts) == 1:
        return firsts[0]
    return max(firsts, key=lambda rank: _seconds(layer, costs, rank.label))


def _seconds(layer: Sequence[Work], costs: CostBook, device: str) -> float:
    if not all(costs.can_price(work, device) for work in layer):
        return math.inf
    return math.fsum(costs.cost(work, device).mean_s for work in layer)
