"""Traffic replayed on a serving plan with continuous batching.

Every replica keeps as many batches in flight as it has stages. When a batch is through the
pipeline, the requests that have ended leave it; if others wait and their caches fit, its next pass
is the prefill of the first of them (at most a prefill micro-batch of the plan), else a decode step
of all its requests. A request's whole cache is set aside when it is admitted, so that none is ever
put off again. Requests go to the replica with the least work for its rate.

What comes out is a `Schedule`, timed by the same simulator as every plan: an arrival is an action
without resources that ends when the request comes. The policy's own clock only decides who is in
which pass; a test holds the two together. Source: iteration-level scheduling as in Orca (OSDI'22)
and vLLM, replayed as in Vidur (MLSys'24); passes are priced by the cost book.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreplan.cost_models.costs import Collective, HostLaunch, Segment, Work
from foreplan.cost_models.schedule import COMPUTE, FloatArray, ScheduleBuilder
from foreplan.cost_models.simulator import Simulator
from foreplan.cost_models.timeline import Timeline
from foreplan.errors import InfeasibleError, SpecError
from foreplan.planner.base import Problem
from foreplan.planner.serving.pipeline import TOKEN_BYTES, stage_kernels
from foreplan.planner.serving.planner import ServingPlanner, serving_model
from foreplan.planner.serving.pricing import DECODE, PREFILL, MicroBatches, Pricing
from foreplan.planner.serving.spec import ServingDecision
from foreplan.planner.serving.traffic import Request

#: Lengths are priced at the next multiple of this many tokens.
BUCKET = 32
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Replay:
    """What became of the requests.

    Attributes:
        timeline: simulated; ranks are the stages, replica by replica.
        first_s: seconds from arrival to the first token, by request.
        token_s: mean seconds between later tokens; NaN where there is one token.
        total_s: seconds from arrival to the last token.
        tokens: generated in all.
        most_cached: largest share of a replica's cache in use.
        passes: (replica, indices of requests, phase) of every pass, in the order of the schedule.
        clock_off_s: how far the policy's clock was from the simulator's, at most.
    """

    timeline: Timeline
    first_s: FloatArray
    token_s: FloatArray
    total_s: FloatArray
    tokens: int
    most_cached: float
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
    requests: Sequence[Request],
) -> Replay:  # fmt: skip
    """Serve requests.

    Args:
        problem: of the plan; its costs price the passes.
        replicas: each with the requests that it was planned to hold together.
        requests: by arrival.

    Raises:
        SpecError: a request that is longer than the model attends to or than a replica's cache.
        MissingDataError: a pass has no price.
    """
    if not requests:
        raise SpecError("traffic", got="no requests", expected="at least one")
    labels = [stage.device for decision, _ in replicas for stage in decision.stages]
    log = _Log(ScheduleBuilder(labels), [], [], [])
    servers, first = [], 0
    for number, (decision, batch) in enumerate(replicas):
        servers.append(_Server(problem, decision, batch, number, first, log))
        first += len(decision.stages)
    load = np.zeros(len(servers))
    queues: list[list[int]] = [[] for _ in servers]
    for index, request in enumerate(requests):
        room = [
            i for i, server in enumerate(servers) if server.holds(request, f"request {index + 1}")
        ]
        if not room:
            raise SpecError(
                f"request {index + 1}", got=f"{request.prompt_tokens + request.new_tokens} tokens",
                expected=f"at most the {max(s.cache_tokens for s in servers)} that a cache holds",
            )  # fmt: skip
        k = min(room, key=lambda i: (load[i] + servers[i].work_s(request), i))
        load[k] += servers[k].work_s(request)
        queues[k].append(index)
    for server, queue in zip(servers, queues, strict=True):
        server.serve(requests, queue)
    schedule = log.builder.build()
    timeline = Simulator(schedule).run(np.array(log.seconds))
    return _replay(timeline, log, requests, max(s.most_cached for s in servers))


def largest_rate(
    problem: Problem[Any], replicas: Sequence[tuple[ServingDecision, int]],
    requests: Sequence[Request],
) -> float:  # fmt: skip
    """Requests a second that the plan serves when there are always some waiting."""
    waiting = [Request(0.0, r.prompt_tokens, r.new_tokens) for r in requests]
    return len(requests) / replay(problem, replicas, waiting).timeline.makespan_s


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
            fix=f"--rate {most_per_s * 0.9:.3g}, shorter requests, or a plan of more devices",
        )


@dataclass
class _Log:
    """The schedule so far, the seconds of each action, and what each pass was."""

    builder: ScheduleBuilder
    seconds: list[float]
    passes: list[tuple[int, tuple[int, ...], str, int]]  # with the action that ends it
    clock: list[tuple[int, float]]  # actions, and when they end by the policy's clock

    def add(self, seconds: float, *args: Any, **fields: Any) -> int:
        """Add an action of a known duration."""
        self.seconds.append(seconds)
        return self.builder.add(*args, **fields)


@dataclass
class _Slot:
    """A batch in flight: its requests as [index, tokens made], when it is back, by which action."""

    number: int
    running: list[list[int]]
    ready_s: float = 0.0
    back: int = -1


class _Server:
    """One replica: prices its passes and decides who is in which."""

    def __init__(
        self, problem: Problem[Any], decision: ServingDecision, batch: int, number: int, first: int,
        log: _Log,
    ) -> None:  # fmt: skip
        self._problem, self._decision, self._log = problem, decision, log
        self._number, self._first = number, first
        self._model = serving_model(problem)
        self._kernels = [stage_kernels(stage) for stage in decision.stages]
        self._ranks = [problem.cluster.ranks()[stage.rank] for stage in decision.stages]
        workload = problem.workload.model_copy(update={"batch": batch})
        self._workload = workload
        planned = Problem(problem.model, problem.cluster, workload, problem.costs, problem.seed)
        self.cache_tokens = _cache_tokens(planned, decision)
        self.most_cached = 0.0
        self._works: dict[tuple[int, str, int, int], tuple[Segment, float]] = {}
        self._hops: dict[tuple[str, int, int, int], tuple[Collective, float]] = {}
        planned_s = sum(self._pass_s(PREFILL, 1, workload.prompt_tokens)) + sum(
            self._pass_s(DECODE, batch, workload.prompt_tokens)
        )
        self._rate = batch / planned_s

    def holds(self, request: Request, where: str) -> bool:
        """Whether the cache holds a request at all."""
        total = request.prompt_tokens + request.new_tokens
        if total > self._model.max_sequence:
            raise SpecError(
                where, got=f"{total} tokens",
                expected=f"at most the {self._model.max_sequence} of {self._model.name}",
            )  # fmt: skip
        return total <= self.cache_tokens

    def work_s(self, request: Request) -> float:
        """What a request weighs on this replica, for balancing."""
        return (request.prompt_tokens + request.new_tokens) / self._rate

    def serve(self, requests: Sequence[Request], queue: Sequence[int]) -> None:
        """Take every request of a queue through the pipeline."""
        stages = len(self._ranks)
        slots = [_Slot(k, []) for k in range(stages)]
        waiting: deque[int] = deque()
        coming = deque(queue)
        arrivals: dict[int, int] = {}
        free_s = [0.0] * stages
        links: dict[tuple[int, int], float] = {}
        cached, step, freed = 0, 0, -1
        while coming or waiting or any(slot.running for slot in slots):
            slot = min(slots, key=lambda s: (s.ready_s, s.number))
            start = max(slot.ready_s, free_s[0])
            for entry in list(slot.running):
                if entry[1] >= requests[entry[0]].new_tokens:
                    slot.running.remove(entry)
                    cached -= _size(requests[entry[0]])
                    freed = slot.back
            while coming and requests[coming[0]].arrival_s <= start:
                waiting.append(coming.popleft())
            room = self.cache_tokens - cached
            taken: list[int] = []
            while waiting and len(taken) < self._decision.prefill_microbatch:
                size = _size(requests[waiting[0]])
                if size > room:
                    break
                room -= size
                cached += size
                taken.append(waiting.popleft())
            self.most_cached = max(self.most_cached, cached / self.cache_tokens)
            if taken:
                for index in taken:
                    seconds = requests[index].arrival_s
                    arrivals[index] = self._log.add(
                        seconds, "arrive", self._first, Segment("arrive"), microbatch=index,
                        resources=(),
                    )  # fmt: skip
                needed = tuple(arrivals[i] for i in taken) + ((freed,) if freed >= 0 else ())
                length = math.fsum(requests[i].prompt_tokens for i in taken) / len(taken)
                phase, members = PREFILL, taken
            elif slot.running:
                phase, needed, members = DECODE, (), [i for i, _ in slot.running]
                length = math.fsum(
                    requests[i].prompt_tokens + made for i, made in slot.running
                ) / len(slot.running)
            elif not coming and not waiting and not any(other.running for other in slots):
                break
            else:
                slot.ready_s = self._until(slot, slots, coming, requests)
                continue
            if slot.back >= 0 and slot.back not in needed:
                needed = (*needed, slot.back)
            step += 1
            slot.ready_s, last, slot.back = self._send_through(
                phase, len(members), length, start, needed, slot.number, step, free_s, links
            )
            self._log.passes.append((self._number, tuple(members), phase, last))
            self._log.clock.append((slot.back, slot.ready_s))
            if phase == PREFILL:
                slot.running += [[i, 1] for i in taken]
            else:
                for entry in slot.running:
                    entry[1] += 1

    def _until(
        self, slot: _Slot, slots: Sequence[_Slot], coming: Sequence[int],
        requests: Sequence[Request],
    ) -> float:  # fmt: skip
        """When an idle slot has to look again: at the next arrival or when another slot is back."""
        times = [s.ready_s for s in slots if s.running and s is not slot]
        later = [t for t in times if t > slot.ready_s]
        if coming:
            later.append(requests[coming[0]].arrival_s)
        # A slot that is back at this very moment looks first.
        return max(min(later), slot.ready_s) if later else math.nextafter(max(times), math.inf)

    def _send_through(
        self, phase: str, count: int, length: float, start: float, needed: tuple[int, ...],
        slot: int, step: int, free_s: list[float], links: dict[tuple[int, int], float],
    ) -> tuple[float, int, int]:  # fmt: skip
        """Emit a pass; (when it is back on the first stage, its last action, the return's)."""
        log, stages = self._log, len(self._ranks)
        at, done, arrived = start, -1, needed
        for stage in range(stages):
            if stage:
                at, done = self._hop(phase, count, length, stage - 1, stage, at, done, slot, step,
                                     links)  # fmt: skip
                arrived = (done,)
            work, seconds = self._work(stage, phase, count, length)
            done = log.add(
                seconds, phase, self._first + stage, work, stage=stage, microbatch=slot, step=step,
                dependencies=arrived, resources=(COMPUTE,),
            )  # fmt: skip
            at = max(at, free_s[stage]) + seconds
            free_s[stage] = at
        last = done
        if stages > 1:
            at, done = self._hop(phase, count, 1, stages - 1, 0, at, done, slot, step, links)
        return at, last, done

    def _hop(
        self, phase: str, count: int, length: float, source: int, target: int, at: float,
        after: int, slot: int, step: int, links: dict[tuple[int, int], float],
    ) -> tuple[float, int]:  # fmt: skip
        tokens = count * (_bucket(length) if phase == PREFILL and target else 1)
        key = (phase, tokens, source, target)
        if key not in self._hops:
            size = tokens * (2 * self._model.hidden if target else TOKEN_BYTES)
            ends = (self._ranks[source].index, self._ranks[target].index)
            message = Collective("p2p", size, ends, "bf16" if target else "int64")
            seconds = self._problem.costs.cost(message, self._ranks[source].label).mean_s
            self._hops[key] = (message, seconds)
        message, seconds = self._hops[key]
        log = self._log
        sent = log.add(
            seconds, "send", self._first + source, message, stage=target, microbatch=slot,
            step=step, peer=self._first + target, dependencies=(after,),
            resources=(f"link:{source}>{target}",),
        )  # fmt: skip
        received = log.add(
            0.0, "recv", self._first + target, HostLaunch(0), stage=target, microbatch=slot,
            step=step, peer=self._first + source, dependencies=(sent,), resources=(),
        )  # fmt: skip
        at = max(at, links.get((source, target), 0.0)) + seconds
        links[source, target] = at
        return at, received

    def _pass_s(self, phase: str, count: int, length: float) -> list[float]:
        return [self._work(stage, phase, count, length)[1] for stage in range(len(self._ranks))]

    def _work(self, stage: int, phase: str, count: int, length: float) -> tuple[Segment, float]:
        """A stage's pass over ``count`` requests of a mean length, and its seconds."""
        bucket = _bucket(length)
        key = (stage, phase, count, bucket)
        if key not in self._works:
            decided, kernels = self._decision.stages[stage], self._kernels[stage]
            update = {"prompt_tokens": bucket, "batch": count}
            pricing = Pricing(
                self._model, self._workload.model_copy(update=update), self._problem.costs,
                decided.degree,
            )  # fmt: skip
            sizes = MicroBatches(count, count)
            keys = None if phase == PREFILL else bucket
            layers = pricing.layers(kernels, decided.start, decided.bits, phase, sizes, keys)
            parts: Counter[Work] = Counter(dict(layers))
            if stage == 0:
                parts.update(dict(pricing.embedding(phase, sizes)))
            if decided.end == self._model.layers:
                for item, times in pricing.head(kernels, phase, sizes):
                    parts[item] += times
            exchanged = pricing.exchanges(
                phase, sizes, decided.ranks, decided.end - decided.start, first=stage == 0,
                last=decided.end == self._model.layers,
            )  # fmt: skip
            parts.update(dict(exchanged))
            made = Segment(phase, tuple(parts.items()))
            seconds = self._problem.costs.cost(made, self._ranks[stage].label).mean_s
            self._works[key] = (made, seconds)
        return self._works[key]


def _bucket(length: float) -> int:
    return max(BUCKET, math.ceil(length / BUCKET) * BUCKET)


def _size(request: Request) -> int:
    return request.prompt_tokens + request.new_tokens


def _cache_tokens(problem: Problem[Any], decision: ServingDecision) -> int:
    """Tokens whose keys and values fit every stage beside its weights and workspace."""
    w = problem.workload
    held = w.batch * (w.prompt_tokens + w.new_tokens)
    most = math.inf
    for ledger in ServingPlanner().memory(problem, decision):
        cache = ledger.items.get("kv_cache", 0)
        if cache:
            most = min(most, (cache + (ledger.free_bytes or 0)) // (cache / held))
    return int(most) if math.isfinite(most) else held


def _replay(
    timeline: Timeline, log: _Log, requests: Sequence[Request], most_cached: float
) -> Replay:
    first = np.full(len(requests), np.nan)
    last = np.full(len(requests), np.nan)
    for _, members, phase, action in log.passes:
        end = float(timeline.end_s[action])
        for index in members:
            if phase == PREFILL:
                first[index] = end
            last[index] = end
    off = max(abs(float(timeline.end_s[action]) - moment) for action, moment in log.clock)
    arrival = np.array([r.arrival_s for r in requests])
    new = np.array([r.new_tokens for r in requests])
    later = np.where(new > 1, (last - first) / np.maximum(new - 1, 1), np.nan)
    return Replay(
        timeline, first - arrival, later, last - arrival, int(new.sum()), most_cached,
        tuple((replica, members, phase) for replica, members, phase, _ in log.passes), off,
    )  # fmt: skip
