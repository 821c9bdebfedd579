"""`update`: a cluster as its host was measured again, with what it says beside that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from foreplan.datasets.cluster import Cluster
from foreplan.datasets.cluster_entry import DeviceEntry
from foreplan.datasets.cluster_merge import add_links
from foreplan.datasets.specs import StrictModel, validate
from foreplan.datasets.tier import Contention


def update(known: Cluster, measured: Cluster) -> tuple[Cluster, list[str]]:
    """Put measured devices and links into a cluster.

    Devices that were not measured now stay, and of those that were, the memory caps, prices and
    counts that nothing says anew. Measured figures take the place of other ones for the same.

    Args:
        known: what the file says, perhaps by hand.
        measured: what is known of one host now, profiles relative to the same folder.

    Returns:
        The cluster, and what its reader should know: what stays, and what gives way.
    """
    new = {(entry.host, entry.name): entry for entry in measured.devices}
    entries: list[DeviceEntry] = []
    stay: list[str] = []
    notes: list[str] = []
    for entry in known.devices:
        key = entry.host, entry.name
        found = new.get(key)
        if found is None:
            stay.append(f"{entry.host}/{entry.name}")
            entries.append(entry)
            continue
        label = f"{entry.host}/{entry.name}"
        if entry.profile not in (None, found.profile):
            notes.append(f"{label}: {found.profile} takes the place of profile {entry.profile}")
        if found.memory_bytes is None:
            found = found.model_copy(update={"memory_bytes": entry.memory_bytes})
        elif entry.memory_bytes not in (None, found.memory_bytes):
            notes.append(
                f"{label}: memory_bytes {found.memory_bytes} takes the place of "
                f"{entry.memory_bytes}"
            )
        kept = {"count": entry.count, "price_per_hour": entry.price_per_hour}
        entries.append(found.model_copy(update=kept))
    # A processor is named once for each rank: there may be more ranks now, and fewer are measured
    # where several have one profile.
    ranks = Counter((rank.host, rank.name) for rank in known.ranks())
    for entry in measured.devices:
        key = entry.host, entry.name
        if not ranks[key]:
            entries.append(entry)
        ranks[key] = max(0, ranks[key] - entry.count)
    if stay:
        notes.insert(0, f"not measured now, and kept: {', '.join(dict.fromkeys(stay))}")
    links = {f"what was measured ({tier.label})": tier for tier in measured.tiers}
    joined, told = add_links(_with_devices(known, entries), links)
    contention: dict[Hashable, Contention] = {_key(item): item for item in known.contention}
    for item in measured.contention:
        if contention.get(_key(item), item) != item:
            told.append(f"{item.kind} contention of {item.host}: measured anew")
        contention[_key(item)] = item
    document = _plain(joined) | {
        "contention": [_plain(item) for item in contention.values()],
        "assumptions": list(dict.fromkeys(known.assumptions + measured.assumptions)),
    }
    return validate(Cluster, document, "measured cluster"), notes + told


def _with_devices(cluster: Cluster, entries: list[DeviceEntry]) -> Cluster:
    document = _plain(cluster) | {"devices": [_plain(entry) for entry in entries]}
    return validate(Cluster, document, "measured cluster")


def _key(item: Contention) -> Hashable:
    return item.kind, item.host


def _plain(item: StrictModel) -> dict[str, object]:
    return item.model_dump(mode="json", exclude_defaults=True)
