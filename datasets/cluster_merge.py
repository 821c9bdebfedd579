"""`merge`: the clusters of several hosts as one, `add_links`: the links measured between them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TypeVar

from foreplan.datasets.cluster import Cluster, group_word
from foreplan.datasets.cluster_entry import DEFAULT_HOST
from foreplan.datasets.specs import StrictModel, validate
from foreplan.datasets.tier import EVERYONE, Contention, Tier
from foreplan.errors import MissingDataError, SpecError


def merge(first: Cluster, *others: Cluster) -> Cluster:
    """Join the clusters of several hosts into one.

    Devices are told apart by their host. What both say alike is taken once. A tier that spoke of
    ``all`` or of a bare device name then speaks of its own hosts only.

    Args:
        first: a cluster.
        others: more of them; profile paths must be relative to one folder (`Cluster.rebase`).

    Raises:
        SpecError: two clusters both call their host ``localhost``, or they give other entries,
            figures or contention for the same thing.
    """
    merged = first
    for other in others:
        merged = _merge_two(_qualified(merged), _qualified(other))
    return merged


def add_links(cluster: Cluster, links: Mapping[str, Tier]) -> tuple[Cluster, list[str]]:
    """Add links that were measured between hosts.

    Both hosts write what they measured together, so two of the same figures are one. Where figures
    of the same link differ, the last ones count: a measurement says nothing of when it was taken,
    and whoever names the files knows.

    Args:
        cluster: with the hosts.
        links: tiers by where each stands, as a reader is told.

    Returns:
        The cluster, and of each figure that another took the place of, a line that says so.

    Raises:
        SpecError: a link of something that the cluster does not have.
    """
    names = _names(cluster)

    def key(tier: Tier) -> Hashable:
        return tier.scope, tier.backend, frozenset(_words(tier, names))

    tiers = {key(tier): ("the cluster's own", tier) for tier in cluster.tiers}
    notes = []
    for where, tier in links.items():
        name, known = tiers.get(key(tier), (where, tier))
        if _figures(known) != _figures(tier):
            notes.append(f"{tier.label}: {where} takes the place of {name} figures, which differ")
        tiers[key(tier)] = (f"{where}'s", tier if _figures(known) != _figures(tier) else known)
    document = cluster.model_dump(mode="json", exclude_defaults=True)
    document["tiers"] = [_plain(tier) for _, tier in tiers.values()]
    return validate(Cluster, document, "merged cluster"), notes


def unjoined(cluster: Cluster) -> list[tuple[str, str]]:
    """Pairs of hosts with devices that no tier joins."""
    kinds = {(rank.host, rank.name): rank for rank in cluster.ranks()}
    apart: dict[tuple[str, str], None] = {}
    for a, b in itertools.combinations(kinds.values(), 2):
        if a.host != b.host and (a.host, b.host) not in apart:
            try:
                cluster.link(a, b)
            except MissingDataError:
                apart[a.host, b.host] = None
    return list(apart)


def _figures(tier: Tier) -> dict[str, object]:
    """A tier without the words for what it joins and for where it comes from."""
    return tier.model_dump(mode="json", exclude={"group", "source"})


def _merge_two(a: Cluster, b: Cluster) -> Cluster:
    if a != b and DEFAULT_HOST in a.hosts() and DEFAULT_HOST in b.hosts():
        raise SpecError(
            "devices.host", got=DEFAULT_HOST, expected="host names that tell the clusters apart"
        )
    devices = list(a.devices)
    for key in dict.fromkeys((entry.host, entry.name) for entry in b.devices):
        ours, theirs = ([e for e in c.devices if (e.host, e.name) == key] for c in (a, b))
        if ours and ours != theirs:
            raise SpecError(
                f"devices: {key[0]}/{key[1]}",
                got=[_plain(entry) for entry in theirs],
                expected=f"what the other cluster says of it: {[_plain(e) for e in ours]}",
            )
        devices += [] if ours else theirs
    document = {
        "devices": [_plain(entry) for entry in devices],
        "tiers": _union(
            "tiers", a.tiers, b.tiers, lambda t: (t.scope, t.backend, frozenset(t.group))
        ),
        "contention": _union(
            "contention", a.contention, b.contention, lambda item: (item.kind, item.host)
        ),
        "assumptions": list(dict.fromkeys(a.assumptions + b.assumptions)),
    }
    return validate(Cluster, document, "merged cluster")


_Item = TypeVar("_Item", bound=StrictModel)


def _union(
    where: str, ours: Iterable[_Item], theirs: Iterable[_Item], key: Callable[[_Item], Hashable]
) -> list[dict[str, object]]:
    known = {key(item): item for item in ours}
    for item in theirs:
        if known.setdefault(key(item), item) != item:
            raise SpecError(
                where,
                got=_plain(item),
                expected=f"the other cluster's figures for the same: {_plain(known[key(item)])}",
            )
    return [_plain(item) for item in known.values()]


def _plain(item: StrictModel) -> dict[str, object]:
    return item.model_dump(mode="json", exclude_defaults=True)


def _qualified(cluster: Cluster) -> Cluster:
    """Say of which hosts each tier and each contention speaks, so that it stays true merged."""
    names = _names(cluster)
    tiers = [tier.model_copy(update={"group": _words(tier, names)}) for tier in cluster.tiers]
    contention: dict[tuple[str, str], Contention] = {}
    for item in sorted(cluster.contention, key=lambda item: item.host is not None):
        for host in [item.host] if item.host else cluster.hosts():
            known = contention.get((item.kind, host))
            factors = {**(known.factors if known else {}), **item.factors}
            # Parts of a pass of one rank belong to the entry that has its factor.
            programs = known.programs if known and 1 not in item.factors else item.programs
            contention[item.kind, host] = Contention(
                kind=item.kind, factors=factors, programs=programs, host=host, source=item.source
            )
    return Cluster(
        devices=cluster.devices,
        tiers=tuple(tiers),
        contention=tuple(contention.values()),
        assumptions=cluster.assumptions,
    )


def _names(cluster: Cluster) -> dict[str, list[str]]:
    """What ``all`` and each bare device name stand for, in words that say the host."""
    names: dict[str, list[str]] = {EVERYONE: list(cluster.hosts())}
    for rank in cluster.ranks():
        hosts = names.setdefault(str(rank.name), [])
        if (qualified := f"{rank.host}/{rank.name}") not in hosts:
            hosts.append(qualified)
    return names


def _words(tier: Tier, names: Mapping[str, list[str]]) -> tuple[str, ...]:
    """A tier's group in words that say the host."""
    words = [w for word in tier.group for w in names.get(group_word(word, names) or "", [word])]
    return tuple(dict.fromkeys(words))
