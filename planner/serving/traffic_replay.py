"""Traffic replayed on a serving plan with continuous batching.

Requests go to the replica with the least work for its rate; `Batching` decides which of them are in
which pass, `replica_server` what that costs.

What comes out is a `Schedule`, timed by the same simulator as every plan: an arrival is an action
without resources that ends when the request comes. The policy's own clock only decides who is in
which pass; a test holds the two together. Source: iteration-level scheduling as in Orca (OSDI'22)
and vLLM, replayed as in Vidur (MLSys'24); passes are priced by the cost book.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foreplan.cost_models.schedule import FloatArray
from foreplan.cost_models.schedule_builder import ScheduleBuilder
from foreplan.cost_models.simulator import Simulator
from foreplan.cost_models.timeline import Timeline
from foreplan.errors import InfeasibleError, SpecError
from foreplan.planner.base import Problem
from foreplan.planner.serving.pricing import PREFILL
from foreplan.planner.serving.replica_server import ReplayLog, ReplicaServer
from foreplan.planner.serving.spec import ServingDecision
from foreplan.planner.serving.traffic import MOST_REQUESTS, Request

PERCENTILES = (50, 90, 99)
#: Batches a replica in the mean that the largest rate is told from (assumed): filling and draining
#: the pipeline weigh about an eighth.
FILLS = 8


@dataclass(frozen=True)
class Replay:
    """What became of the requests.

    Attributes:
        timeline: simulated or measured; ranks are the stages, replica by replica.
        first_s: seconds from arrival to the first token, by request.
        token_s: mean seconds between later tokens; NaN where there is one token.
        total_s: seconds from arrival to the last token.
        tokens: generated in all.
        most_cached: largest share of a replica's cache in use.
        most_held: most requests that a replica held at once.
        passes: (replica, indices of requests, phase) of every pass, in the order of the schedule.
        clock_off_s: how far the policy's clock was from the simulator's, at most; 0 of a real run.
    """

    timeline: Timeline
    first_s: FloatArray
    token_s: FloatArray
    total_s: FloatArray
    tokens: int
    most_cached: float
    most_held: int
    passes: tuple[tuple[int, tuple[int, ...], str], ...]
    clock_off_s: float

    @property
    def throughput_tokens_per_s(self) -> float:
        """Tokens over the time to the last of them."""
        return self.tokens / self.timeline.makespan_s

    def figures(self) -> dict[str, float]:
        """Percentiles of the times, throughput."""
        found = {
            "requests": float(len(self.first_s)),
            "throughput_tokens_per_s": self.throughput_tokens_per_s,
            "throughput_requests_per_s": len(self.first_s) / self.timeline.makespan_s,
            "most_cached": self.most_cached,
            "most_held": float(self.most_held),
        }
        for name, values in (
            ("time_to_first_token", self.first_s), ("time_per_output_token", self.token_s),
            ("latency", self.total_s),
        ):  # fmt: skip
            known = values[np.isfinite(values)]
            for q in PERCENTILES:
                if len(known):
                    found[f"{name}_p{q}_s"] = float(np.percentile(known, q))
        return found


def replay(
    problem: Problem[Any], replicas: Sequence[tuple[ServingDecision, int]],
    requests: Sequence[Request], paces: Sequence[float] = (),
) -> Replay:  # fmt: skip
    """Serve requests.

    Args:
        problem: of the plan; its costs price the passes.
        replicas: each with the most requests that it holds at once, the plan's batch.
        requests: by arrival.
        paces: of each stage, replica by replica, how many times as long its passes take as they
            cost; 1 if left out.

    Raises:
        SpecError: a request that is longer than the model attends to or than a replica's cache.
        MissingDataError: a pass has no price.
    """
    log, servers = servers_of(problem, replicas, paces)
    for server, queue in zip(servers, deal(servers, requests), strict=True):
        server.serve(requests, queue)
    timeline = Simulator(log.builder.build()).run(np.array(log.seconds))
    off = max(abs(float(timeline.end_s[action]) - moment) for action, moment in log.clock)
    most = max(s.most_cached for s in servers), max(s.most_held for s in servers)
    return outcome(timeline, log, requests, most, off)


def servers_of(
    problem: Problem[Any], replicas: Sequence[tuple[ServingDecision, int]],
    paces: Sequence[float] = (),
) -> tuple[ReplayLog, list[ReplicaServer]]:  # fmt: skip
    """A server a replica, and the log of all; arguments as of `replay`."""
    labels = [stage.device for decision, _ in replicas for stage in decision.stages]
    log = ReplayLog(ScheduleBuilder(labels), [], [], [])
    servers, first = [], 0
    for number, (decision, batch) in enumerate(replicas):
        own = paces[first : first + len(decision.stages)]
        servers.append(ReplicaServer(problem, decision, batch, number, first, log, own))
        first += len(decision.stages)
    return log, servers


def deal(servers: Sequence[ReplicaServer], requests: Sequence[Request]) -> list[list[int]]:
    """Indices of the requests of each replica: of the one with the least work for its rate.

    Raises:
        SpecError: no requests, or one that is too long for every cache.
    """
    if not requests:
        raise SpecError("traffic", got="no requests", expected="at least one")
    load = np.zeros(len(servers))
    queues: list[list[int]] = [[] for _ in servers]
    for index, request in enumerate(requests):
        where = request.source or f"request {index + 1}"
        room = [i for i, server in enumerate(servers) if server.holds(request, where)]
        if not room:
            most = max(server.limits.cache_tokens for server in servers)
            raise SpecError(
                where, got=f"{request.prompt_tokens + request.new_tokens} tokens",
                expected=f"at most the {most} that a cache holds",
            )  # fmt: skip
        k = min(room, key=lambda i: (load[i] + servers[i].work_s(request), i))
        load[k] += servers[k].work_s(request)
        queues[k].append(index)
    return queues


def largest_rate(
    problem: Problem[Any], replicas: Sequence[tuple[ServingDecision, int]],
    requests: Sequence[Request],
) -> float:  # fmt: skip
    """Requests a second that the plan serves when there are always some waiting.

    Few requests come again until they fill every replica `FILLS` times: a rate of fewer would be
    that of a plan half empty.
    """
    filling = FILLS * sum(batch for _, batch in replicas)
    times = max(1, min(math.ceil(filling / len(requests)), MOST_REQUESTS // len(requests)))
    waiting = [replace(r, arrival_s=0.0) for r in requests] * times
    return len(waiting) / replay(problem, replicas, waiting).timeline.makespan_s


def check_rate(requests: Sequence[Request], most_per_s: float) -> None:
    """Refuse traffic that comes faster than it can be served.

    Raises:
        InfeasibleError: says the largest rate that can be sustained.
    """
    span = requests[-1].arrival_s - requests[0].arrival_s
    rate = (len(requests) - 1) / span if span > 0 else 0.0
    if rate > most_per_s:
        raise InfeasibleError(
            f"{rate:.4g} requests/s arrive and the plan serves at most {most_per_s:.4g}: the queue "
            "would grow without end",
            fix=f"--rate {most_per_s * 0.9:.3g}, shorter requests, or a plan of a larger batch or "
            "of more devices",
        )


def outcome(
    timeline: Timeline, log: ReplayLog, requests: Sequence[Request], most: tuple[float, int],
    clock_off_s: float = 0.0,
) -> Replay:  # fmt: skip
    """What became of requests, simulated or for real.

    Args:
        timeline: of the log's schedule.
        log: which action ends each pass.
        requests: by arrival.
        most: share of a cache and requests held.
        clock_off_s: see `Replay`.
    """
    first = np.full(len(requests), np.nan)
    last = np.full(len(requests), np.nan)
    for _, members, phase, action in log.passes:
        end = float(timeline.end_s[action])
        for index in members:
            if phase == PREFILL:
                first[index] = end
            last[index] = end
    arrival = np.array([r.arrival_s for r in requests])
    new = np.array([r.new_tokens for r in requests])
    later = np.where(new > 1, (last - first) / np.maximum(new - 1, 1), np.nan)
    return Replay(
        timeline, first - arrival, later, last - arrival, int(new.sum()), *most,
        tuple((replica, members, phase) for replica, members, phase, _ in log.passes), clock_off_s,
    )  # fmt: skip
