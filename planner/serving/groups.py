"""Groups of equal devices that share a stage: which there can be, and what their exchanges cost.

For the solver a group of ``k`` devices is one device of a *kind* of its own: (device type, ``k``).
How many groups of each size a type is cut into is decided outside of it, by `groupings`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from foreplan.cost_models.tensor_parallel import degrees
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.cluster_entry import Rank
from foreplan.datasets.kernels.registry import kernels_for
from foreplan.datasets.models.model import Model
from foreplan.datasets.program import program
from foreplan.errors import MissingDataError, SpecError
from foreplan.planner.serving.pricing import Pricing
from foreplan.planner.serving.spec import ServingWorkload
from foreplan.solvers.chain_problem import IntArray

#: Share by which prices of a large product may differ between GPUs that count as alike.
ALIKE = 0.05


@dataclass(frozen=True, slots=True)
class Kind:
    """What a stage can run on.

    Attributes:
        type: which of the cluster's device types.
        degree: how many devices of it.
        blocks: groups of ranks that stand for all of this kind: neighbours in the cluster's order,
            one for each set of links that joins them.
    """

    type: int
    degree: int
    blocks: tuple[tuple[int, ...], ...]


def kinds_of(
    model: Model, workload: ServingWorkload, cluster: Cluster, types: Sequence[Sequence[Rank]]
) -> list[Kind]:
    """Kinds that the workload allows, type by type, single devices first.

    Raises:
        SpecError: a degree that the model cannot be split by, or that no type has devices for.
        MissingDataError: no link joins the devices of the degree that is asked for.
    """
    asked = workload.tensor_parallel
    most = max(len(ranks) for ranks in types)
    if asked != "auto" and asked > 1:
        if asked not in degrees(model, asked):
            raise SpecError(
                "workload.tensor_parallel", got=asked,
                expected=f"auto or one of {_listed(degrees(model, max(most, 8)))}, by which "
                f"{model.name} can be split",
            )  # fmt: skip
        if asked > most:
            raise SpecError(
                "workload.tensor_parallel", got=asked,
                expected=f"at most {most}: as many devices of one host are alike",
            )  # fmt: skip
    found = []
    for t, ranks in enumerate(types):
        wanted = degrees(model, len(ranks)) if asked == "auto" else (asked,)
        for degree in wanted:
            if degree > len(ranks):
                continue
            try:
                found.append(Kind(t, degree, _blocks(cluster, ranks, degree)))
            except MissingDataError:
                if asked != "auto":
                    raise
    return found


def types_of(cluster: Cluster, capacity_bytes: Sequence[int], pricing: Pricing) -> list[list[Rank]]:
    """Devices that are alike, type by type, in the cluster's order.

    That is: one line of the cluster's description, or lines that say the same; of their prices
    where the workload asks what devices cost. Where devices may share a stage, so are GPUs of a
    host that it lists one by one (``cuda:0``, ``cuda:1``) if they have the same memory and a large
    product costs the same on both, within `ALIKE`.
    """
    types: dict[tuple[object, ...], list[Rank]] = {}
    for rank, capacity in zip(cluster.ranks(), capacity_bytes, strict=True):
        price = rank.price_per_hour if pricing.workload.priced else None
        types.setdefault((rank.host, rank.name, rank.profile, capacity, price), []).append(rank)
    if pricing.workload.tensor_parallel == 1:
        return list(types.values())
    merged: list[list[Rank]] = []
    for ranks in types.values():
        twin = next(
            (
                other for other in merged
                if _same_gpu(other[0], ranks[0], pricing)
                and capacity_bytes[other[0].index] == capacity_bytes[ranks[0].index]
            ),
            None,
        )  # fmt: skip
        if twin is None:
            merged.append(list(ranks))
        else:
            twin += ranks
    return merged


def _same_gpu(a: Rank, b: Rank, pricing: Pricing) -> bool:
    gpus = a.name.kind == "cuda" and a.name.any_index == b.name.any_index
    if not gpus or a.host != b.host:
        return False
    if pricing.workload.priced and a.price_per_hour != b.price_per_hour:
        return False
    widest_linear = max(pricing.model.linears, key=lambda linear: linear.n * linear.k)
    variant = kernels_for("linear", "cuda")[0]
    rows = pricing.workload.prompt_tokens
    probe = program("linear", variant, rows=rows, n=widest_linear.n, k=widest_linear.k)
    try:
        one, other = (pricing.costs.cost(probe, rank.label).mean_s for rank in (a, b))
    except MissingDataError:
        return False
    return abs(one - other) <= ALIKE * min(one, other)


def widest(kinds: Sequence[Kind]) -> list[Kind]:
    """The largest group of each type alone: one per type, as large as the model allows."""
    found = {kind.type: kind for kind in sorted(kinds, key=lambda kind: kind.degree)}
    return [found[t] for t in sorted(found)]


def _blocks(cluster: Cluster, ranks: Sequence[Rank], degree: int) -> tuple[tuple[int, ...], ...]:
    if degree == 1:
        return ()
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for begin in range(len(ranks) - degree + 1):
        block = tuple(rank.index for rank in ranks[begin : begin + degree])
        found.setdefault(tuple(id(tier) for tier in cluster.links(block)), block)
    return tuple(found.values())


def groupings(
    kinds: Sequence[Kind], devices: Sequence[int], *, most: int | None = None
) -> IntArray:
    """``[G, kinds]`` every way to cut the types into groups to which no group can be added.

    Others leave devices out that a kind has a use for; the solver may leave any group out, so that
    they are among the answers to these.

    Args:
        kinds: type by type.
        devices: of each type.
        most: where there are more ways (`grouping_count`), those in which a type has groups of two
            sizes, or if these are too many of one, and of what is left over the largest.
    """
    depth = None
    if most is not None and grouping_count(kinds, devices) > most:
        depth = 2 if math.prod(map(len, _by_type(kinds, devices, 2))) <= most else 1
    joined = [tuple(itertools.chain(*each)) for each in itertools.product(
        *_by_type(kinds, devices, depth)
    )]  # fmt: skip
    return np.array(joined, dtype=np.int64)


def grouping_count(kinds: Sequence[Kind], devices: Sequence[int]) -> int:
    """How many ways `groupings` has if none is left out."""
    return math.prod(
        _ways_count(tuple(kind.degree for kind in kinds if kind.type == t), count)
        for t, count in enumerate(devices)
    )


def _by_type(
    kinds: Sequence[Kind], devices: Sequence[int], depth: int | None
) -> list[list[tuple[int, ...]]]:
    """Of each type, numbers of groups of its kinds: all, or with ``depth`` sizes chosen freely."""
    found: list[list[tuple[int, ...]]] = []
    for t, count in enumerate(devices):
        sizes = [kind.degree for kind in kinds if kind.type == t]
        ways = _ways(sizes, count) if depth is None else _thin_ways(sizes, count, depth)
        found.append(list(ways) or [()])
    return found


def _ways(sizes: Sequence[int], room: int) -> Iterator[tuple[int, ...]]:
    """Numbers of groups of each size, sizes rising, that leave no room for one more of any."""
    if len(sizes) <= 1:
        yield tuple(room // size for size in sizes)
        return
    *small, large = sizes
    for count in range(room // large + 1):
        for rest in _ways(small, room - count * large):
            yield *rest, count


def _ways_count(sizes: tuple[int, ...], room: int) -> int:
    """How many `_ways` has: those that leave fewer devices over than the smallest group takes."""
    ends = np.zeros(room + 1, dtype=object)
    ends[0] = 1
    for size in sizes:
        for used in range(size, room + 1):
            ends[used] += ends[used - size]
    return int(ends[max(0, room + 1 - min(sizes, default=1)) :].sum())


def _thin_ways(sizes: Sequence[int], room: int, depth: int) -> list[tuple[int, ...]]:
    """Those of `_ways` that have any number of one size, as much as there is room for of others."""
    found: dict[tuple[int, ...], None] = {}
    orders = itertools.permutations(range(len(sizes)), min(depth, len(sizes)))
    for first, *others in orders:
        fullest = room // sizes[first]
        for count in range(1, fullest + 1) if others else (fullest,):
            way, left = [0] * len(sizes), room - count * sizes[first]
            way[first] = count
            for k in (*others, *reversed(range(len(sizes)))):
                way[k] += left // sizes[k]
                left %= sizes[k]
            found[tuple(way)] = None
    return list(found)


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
