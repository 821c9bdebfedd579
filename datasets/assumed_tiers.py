"""Links of a cluster that was only listed: published figures, each noted as an assumption."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from foreplan.datasets import device_zoo
from foreplan.datasets.cluster_entry import Rank
from foreplan.datasets.quantity import format_bandwidth, format_seconds
from foreplan.datasets.tier import EVERYONE, Tier

ASSUMED_LATENCY_S = 1e-5
"""Of a message between two devices; the constant of aiconfigurator's system table."""
ASSUMED_NETWORK = 25e9
"""Bytes per second between hosts: the A100 systems of aiconfigurator's table (200 Gbit/s)."""


def assumed_tiers(ranks: Sequence[Rank]) -> tuple[tuple[Tier, ...], list[str]]:
    """Assume links for a cluster of which no link was said.

    Between equal devices of a host that have one, the zoo's peer link (NVLink); else the slower
    host link (PCIe) of the two; between hosts `ASSUMED_NETWORK`. A host with a device whose link is
    not published gets no tier for all its ranks.

    Returns:
        The tiers, and a sentence for each.
    """
    hosts: dict[str, list[Rank]] = {}
    for rank in ranks:
        hosts.setdefault(rank.host, []).append(rank)
    tiers: list[Tier] = []
    for host, here in hosts.items():
        names = Counter(rank.name for rank in here)
        published = [(device_zoo.device(n.zoo), k) for n, k in names.items() if n.zoo is not None]
        by_name = {device.name: device for device, _ in published}
        count = {device.name: k for device, k in published}
        peers = {
            name: device.peer_link_bandwidth for name, device in by_name.items()
            if device.peer_link_bandwidth and count[name] > 1
        }  # fmt: skip
        for name, speed in peers.items():
            told = by_name[name].sources["peer_link_bandwidth"]
            tiers.append(_tier([f"{host}/{name}"], speed, f"assumed: peer link of {name}, {told}"))
        links = {n: d.host_link_bandwidth for n, d in by_name.items() if d.host_link_bandwidth}
        if len(links) < len(names):
            continue
        # Of two tiers the narrower one counts: devices at least so fast, the fastest first.
        for speed in sorted(set(links.values()), reverse=True):
            among = [name for name in links if links[name] >= speed]
            if sum(count[name] for name in among) < 2 or (len(among) == 1 and among[0] in peers):
                continue
            slowest = by_name[next(name for name in among if links[name] == speed)]
            source = (
                f"assumed: host link of {slowest.name}, {slowest.sources['host_link_bandwidth']}"
            )
            every = len(among) == len(names)
            tiers.append(_tier([host] if every else [f"{host}/{n}" for n in among], speed, source))
    if len(hosts) > 1:
        source = "assumed: network of the A100 systems in aiconfigurator's table"
        tiers.append(_tier([EVERYONE], ASSUMED_NETWORK, source, scope="network"))
    assumptions = [
        f"link {tier.label}: {format_bandwidth(tier.bandwidth_bytes_per_s)} and "
        f"{format_seconds(tier.latency_s)} a message ({tier.source.removeprefix('assumed: ')})"
        for tier in tiers
    ]
    return tuple(tiers), assumptions


def _tier(
    words: Sequence[str], bandwidth: float, source: str,
    *, scope: Literal["host", "network"] = "host",
) -> Tier:  # fmt: skip
    return Tier(
        group=tuple(words),
        scope=scope,
        latency_s=ASSUMED_LATENCY_S,
        bandwidth_bytes_per_s=bandwidth,
        source=source,
    )
