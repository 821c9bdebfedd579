"""`live_replay`: what became of requests in a real run, as the simulation tells it.

The passes of the run are written down by the same code as those of a simulation, so that both are
timelines of one schedule: one of what was measured, one of what these very passes cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from foreplan.cost_models.simulator import Simulator
from foreplan.planner.base import Problem
from foreplan.planner.serving.live_traffic import LiveRecord
from foreplan.planner.serving.pricing import PREFILL
from foreplan.planner.serving.spec import ServingDecision
from foreplan.planner.serving.traffic import Request
from foreplan.planner.serving.traffic_replay import Replay, outcome, servers_of
from foreplan.planner.verify.measured import measured_timeline
from foreplan.planner.verify.runtime import Record
from foreplan.planner.verify.wire import WireGarbled


def live_replay(
    problem: Problem[Any], replicas: Sequence[tuple[ServingDecision, int]],
    requests: Sequence[Request], records: Sequence[LiveRecord],
) -> tuple[Replay, Replay]:  # fmt: skip
    """A run as measured, and its passes as priced.

    Args:
        problem: of the plan; its costs price the passes.
        replicas: as of `foreplan.planner.serving.traffic_replay.replay`.
        requests: by arrival.
        records: of every rank, replica by replica, stage by stage.

    Raises:
        WireGarbled: ranks of a replica that speak of unlike passes, or of other requests.
        MissingDataError: a pass has no price.
    """
    log, servers = servers_of(problem, replicas)
    told: list[Record] = []
    first = 0
    for server, (decision, _) in zip(servers, replicas, strict=True):
        own = records[first : first + len(decision.stages)]
        first += len(own)
        _check(own, len(requests))
        server.follow(requests, [one.known() for one in own[0].passes])
        told += [_record(own, stage, requests) for stage in range(len(own))]
    schedule = log.builder.build()
    most = max(r.most_cached for r in records), max(r.most_held for r in records)
    measured = outcome(measured_timeline(schedule, told), log, requests, most)
    priced = outcome(Simulator(schedule).run(np.array(log.seconds)), log, requests, most)
    return measured, priced


def _check(own: Sequence[LiveRecord], requests: int) -> None:
    passes = own[0].passes
    known = all(i < requests for one in passes for i in one.members)
    slots = all(one.slot < len(own) for one in passes)
    sent = len(passes) if len(own) > 1 else 0
    counts = {(len(r.compute_ns), len(r.sent_ns), len(r.received_ns)) for r in own}
    if not known or not slots or counts != {(len(passes), sent, sent)}:
        raise WireGarbled("a report of a run whose ranks do not speak of the same passes")


def _record(own: Sequence[LiveRecord], stage: int, requests: Sequence[Request]) -> Record:
    """One rank's times in the order of its list in the schedule."""
    times = list(_times(own, stage, requests))
    return Record(tuple(start for start, _ in times), tuple(end for _, end in times))


def _times(
    own: Sequence[LiveRecord], stage: int, requests: Sequence[Request]
) -> Iterator[tuple[int, int]]:
    mine = own[stage]
    for k, one in enumerate(own[0].passes):
        if stage == 0:
            if one.phase == PREFILL:
                for index in one.members:
                    arrival_ns = round(requests[index].arrival_s * 1e9)
                    yield mine.begin_ns, mine.begin_ns + arrival_ns
            yield mine.compute_ns[k]
            if len(own) > 1:
                yield mine.sent_ns[k]
                yield mine.received_ns[k]
        else:
            yield mine.received_ns[k]
            yield mine.compute_ns[k]
            yield mine.sent_ns[k]
