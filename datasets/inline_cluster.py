"""`parse_devices`: a cluster written on the command line, whose links are assumed."""

from __future__ import annotations

import re

from foreplan.datasets.assumed_tiers import assumed_tiers
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.cluster_entry import DEFAULT_HOST
from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.specs import validate
from foreplan.errors import SpecError


def parse_devices(text: str, where: str = "--devices") -> Cluster:
    """Read the inline form: ``2xa100-80g,4xt4``, with hosts ``2xa100-80g@big,4xt4@small``.

    Memory is the zoo's. The links are assumed, and ``assumptions`` says so: between equal devices
    that have one, the zoo's peer link (NVLink); else the slowest host link (PCIe) of the host's
    devices; between hosts a constant (see `foreplan.datasets.assumed_tiers`). Ranks without a
    published link get no tier, and `Cluster.link` then raises.

    Args:
        text: ``COUNTxNAME@HOST`` items apart by commas; count and host may be left out.
        where: argument or field it stands in, for the error.

    Raises:
        SpecError: no such form or device.
    """
    entries: list[dict[str, object]] = []
    assumptions: list[str] = []
    # A comma before threads= or isa= belongs to the device's name.
    for item in re.split(r",(?!\s*(?:threads|isa)\s*=)", text):
        match = re.fullmatch(
            r"\s*(?:(?P<count>[0-9]{1,6})\s*[xX×*]\s*)?(?P<name>[^@]+?)\s*(?:@\s*(?P<host>\S+)\s*)?",
            item,
        )
        if match is None:
            raise SpecError(where, got=text, expected="devices such as 2xa100-80g,4xt4")
        name = DeviceName.parse(match["name"], where)
        if name.zoo is not None and match["name"].lower() != name.zoo:
            assumptions.append(f"{match['name']} is read as the zoo's {name}")
        entries.append(
            {
                "name": str(name),
                "count": int(match["count"] or 1),
                "host": match["host"] or DEFAULT_HOST,
            }
        )
    bare = validate(Cluster, {"devices": entries}, where)
    tiers, about_tiers = assumed_tiers(bare.ranks())
    if len(bare.ranks()) > 1 and "@" not in text:
        assumptions.append(f"no host was given: {text} share one")
    return Cluster(devices=bare.devices, tiers=tiers, assumptions=(*assumptions, *about_tiers))
