"""`merge`: the clusters of several hosts as one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from foreplan.datasets.cluster import Cluster, group_word
from foreplan.datasets.cluster_entry import DEFAULT_HOST
from foreplan.datasets.specs import StrictModel, validate
from foreplan.datasets.tier import EVERYONE, Contention
from foreplan.errors import SpecError


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
    names: dict[str, list[str]] = {EVERYONE: list(cluster.hosts())}
    for rank in cluster.ranks():
        hosts = names.setdefault(str(rank.name), [])
        if (qualified := f"{rank.host}/{rank.name}") not in hosts:
            hosts.append(qualified)
    tiers = []
    for tier in cluster.tiers:
        words = [w for word in tier.group for w in names.get(group_word(word, names) or "", [word])]
        tiers.append(tier.model_copy(update={"group": tuple(dict.fromkeys(words))}))
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
