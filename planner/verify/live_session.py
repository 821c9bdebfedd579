"""`LiveSession`: one rank that serves what comes while it runs, in a process of its own.

Unlike a plain `Session` it has no program: what it computes, and when, is decided as requests
arrive. It meets the other ranks, and speaks with the leader, in the same way.
"""

from __future__ import annotations

import functools
import time
from datetime import timedelta

from foreplan.datasets.timing.host_memory import data_bytes
from foreplan.planner.verify.clock import HostClock
from foreplan.planner.verify.connections import Connections
from foreplan.planner.verify.gloo_channels import GlooChannels
from foreplan.planner.verify.placement import cap_memory
from foreplan.planner.verify.session import Session, facts_of, held_bytes, seat_of


class LiveSession(Session):
    """See the module; takes what a `Session` takes, on processors."""

    def run(self) -> None:
        """Load, report, and follow the leader's words until it hangs up or says ``exit``."""
        job = self._job
        self._join()
        seat = seat_of(job)
        channels = functools.partial(
            GlooChannels, (), (), job.rank, timeout=timedelta(seconds=job.timeout_s),
            kept=Connections(),
        )  # fmt: skip
        messages = channels(clock=HostClock(0)).messages  # opened by all ranks together
        self._meet()
        cap_memory(seat, job.capacity_bytes)
        before = data_bytes()
        live = self._planner.live(self._problem, self._decision, job.rank, mode=job.mode)
        self._wire.send({"ready": {**facts_of(seat), "messages": messages}})
        while True:
            word = self._wire.receive()
            if "clock" in word:
                self._wire.send({"clock": time.monotonic_ns()})
            elif "serve" in word:
                made = live.serve(word["given"], lambda clock: channels(clock=clock), self._meet)
                self._wire.send(
                    {"served": word["serve"], "record": made,
                     "memory_bytes": live.memory_bytes(), "held_bytes": held_bytes(seat, before)}
                )  # fmt: skip
            else:
                return
