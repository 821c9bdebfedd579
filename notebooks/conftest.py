"""Ports of the tested notebooks' kernels: chosen here, so that nobody else takes them by chance.

A kernel's manager asks the system for free ports, lets them go and has the kernel bind them a
second later; another worker's kernel, or any connection going out, may have got them by then.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket

import pytest
from jupyter_client.connect import LocalPortCache

#: Below the range that systems hand out ports from; other workers have other process ids.
FIRST_PORT, PORTS, PER_WORKER = 10000, 20000, 100
_turns = itertools.count()

#: The first two go to one worker, and the other one soon has the rest: behind the tour, which takes
#: as long as all others together, comes one that is quick.
FIRST = ("1_tour.ipynb", "5_bubbles.ipynb")


def _port(_: LocalPortCache, ip: str) -> int:
    for _turn in range(PER_WORKER):
        place = PER_WORKER * os.getpid() + next(_turns) % PER_WORKER
        port = FIRST_PORT + place % PORTS
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((ip, port))
            return port
    raise OSError(
        f"no free port in {PER_WORKER} from {FIRST_PORT + PER_WORKER * os.getpid() % PORTS}"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST.index(name) if (name := item.path.name) in FIRST else 9)


def pytest_runtest_setup() -> None:
    # nbmake and nbclient hand no settings down to the manager of a kernel.
    LocalPortCache.find_available_port = _port  # type: ignore[assignment, method-assign]
