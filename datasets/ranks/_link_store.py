"""How the two ends of `foreplan.datasets.ranks.links` find each other over a network."""

from __future__ import annotations

import datetime
import json
import os
import socket
from typing import Any


def open_store(settings: dict[str, Any], limit: datetime.timedelta) -> Any:
    """The store of the two ends; rank 0 serves it and tells the other one what to measure.

    Args:
        settings: of this end's rank; the other end's get ``kinds`` and ``sizes``.
        limit: for the other end to come.

    Raises:
        TimeoutError: nobody came.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = settings["host"], int(settings["port"])
    server = int(settings["rank"]) == 0
    store = TCPStore(host, port, int(settings["world"]), server, limit, False)
    if server:
        store.set("foreplan/plan", json.dumps([settings[k] for k in ("kinds", "sizes")]))
        try:
            store.wait(["foreplan/hello"], limit)
        except RuntimeError as error:
            raise TimeoutError(
                f"nobody came to {host}:{port} within {limit.total_seconds():g} s"
            ) from error
    else:
        settings["kinds"], settings["sizes"] = json.loads(store.get("foreplan/plan"))
        store.set("foreplan/hello", "1")
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", _interface(host, server))
    return store


def _interface(host: str, server: bool) -> str:
    """Network interface that reaches the endpoint (or, on the server, holds its address)."""
    import psutil

    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    if server:
        mine = str(address[0])
    else:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # chooses the route, sends nothing
            mine = str(probe.getsockname()[0])
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address.partition("%")[0] == mine for a in addresses):
            return str(name)
    return "lo"
