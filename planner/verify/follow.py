"""`follow`: take part, with this host's devices, in a verification that another host leads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from foreplan.datasets.cluster_entry import Rank
from foreplan.errors import VerificationError
from foreplan.planner.verify.local import LocalProcesses
from foreplan.planner.verify.wire import Message, WireClosed, WireSilent, dial


def follow(
    ranks: Sequence[Rank],
    host: str,
    endpoint: tuple[str, int],
    token: str,
    *,
    folder: str | Path = "",
    timeout_s: float = 300.0,
    say: Callable[[str], None] = lambda text: None,
) -> Message:
    """Start the workers of this host and keep them until the leader is done.

    Args:
        ranks: the cluster's ranks of this host that take part.
        host: name of this host in the cluster.
        endpoint: where the leader listens.
        token: word that tells the leader that it is the same plan.
        folder: that the plan's relative paths start from on this host.
        timeout_s: how long to wait for the leader to listen.
        say: hears what is going on.

    Returns:
        The leader's last message: the result.

    Raises:
        VerificationError: no leader, it verifies another plan, it failed, or a worker died.
    """
    wire = dial(endpoint, timeout_s)
    try:
        members = [rank.index for rank in ranks]
        wire.send({"hello": "host", "host": host, "members": members, "token": token})
        say(f"{host} joined {endpoint[0]}:{endpoint[1]}")
        with LocalProcesses(endpoint, token, folder) as local:
            local.start(ranks)
            while True:
                try:
                    message = wire.receive(0.2)
                except WireSilent:
                    # A worker that ends on its own while the leader is still there has failed.
                    for index, how in local.dead().items():
                        label = next(rank.label for rank in ranks if rank.index == index)
                        text = f"the worker of {label}: {how}; {local.tail(index)}"
                        wire.send({"dead": text})
                        time.sleep(0.5)
                        raise VerificationError(text) from None
                    continue
                except WireClosed as error:
                    raise VerificationError(f"the leader has gone: {error}") from error
                if "error" in message:
                    raise VerificationError(f"the leader says: {message['error']}")
                if "done" in message:
                    return message
                if "exit" in message:
                    raise VerificationError("the leader ended without a result")
    finally:
        wire.close()
