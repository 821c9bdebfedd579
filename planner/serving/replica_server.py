"""One replica under traffic: what each pass costs, and the simulated clock of its stages.

Who is in which pass `Batching` decides, as it does for a real run; here it is asked by a clock that
knows what passes cost. Of a real run the passes are given, and only written down and priced.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from foreplan.cost_models.costs import Collective, HostLaunch, Segment, Work
from foreplan.cost_models.schedule import COMPUTE
from foreplan.cost_models.schedule_builder import ScheduleBuilder
from foreplan.errors import SpecError
from foreplan.planner.base import Problem
from foreplan.planner.serving.batching import BUCKET, Batching, BatchLimits, RequestPass, padded
from foreplan.planner.serving.pipeline import TOKEN_BYTES, stage_kernels
from foreplan.planner.serving.planner import ServingPlanner, serving_model
from foreplan.planner.serving.pricing import DECODE, PREFILL, MicroBatches, Pricing
from foreplan.planner.serving.spec import ServingDecision
from foreplan.planner.serving.traffic import Request


@dataclass
class ReplayLog:
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
    """A batch in flight: when it is back on the first stage, and by which action."""

    number: int
    ready_s: float = 0.0
    back: int = -1


@dataclass
class _Clock:
    """Until when stages and links are busy, and what passes to come depend on."""

    slots: list[_Slot]
    free_s: list[float]
    links: dict[tuple[int, int], float] = field(default_factory=dict)
    freed: int = -1  # the action behind which the last request left
    steps: int = 0

    @classmethod
    def of(cls, stages: int) -> _Clock:
        return cls([_Slot(k) for k in range(stages)], [0.0] * stages)


class ReplicaServer:
    """One replica: prices its passes and says when each is over.

    Attributes:
        limits: what it may hold.
        most_cached: largest share of them in use so far.
        most_held: most requests that were admitted at once so far.
    """

    def __init__(
        self, problem: Problem[Any], decision: ServingDecision, batch: int, number: int, first: int,
        log: ReplayLog, paces: Sequence[float] = (),
    ) -> None:  # fmt: skip
        """Price the planned passes.

        Args:
            problem: of the plan; its costs price the passes.
            decision: the stages.
            batch: requests that they were planned to hold together; never more are admitted.
            number: of the replica.
            first: rank of its first stage in the schedule.
            log: where its actions go.
            paces: of each stage, how many times as long its passes take as they cost; 1 if left
                out.
        """
        self._problem, self._decision, self._log = problem, decision, log
        self._number, self._first = number, first
        self._paces = paces or [1.0] * len(decision.stages)
        self._model = serving_model(problem)
        self._kernels = [stage_kernels(stage) for stage in decision.stages]
        self._ranks = [problem.cluster.ranks()[stage.rank] for stage in decision.stages]
        workload = problem.workload.model_copy(update={"batch": batch})
        self._workload = workload
        self._longest = workload.prompt_tokens + workload.new_tokens
        planned = Problem(problem.model, problem.cluster, workload, problem.costs, problem.seed)
        self.limits = BatchLimits.of(decision, batch, cache_tokens(planned, decision))
        self.most_cached, self.most_held = 0.0, 0
        self._works: dict[tuple[int, str, int, int], tuple[Segment, float]] = {}
        self._hops: dict[tuple[str, int, int, int], tuple[Collective, float]] = {}
        planned_s = sum(self._pass_s(PREFILL, 1, workload.prompt_tokens)) + sum(
            self._pass_s(DECODE, batch, workload.prompt_tokens)
        )
        self._rate = batch / planned_s

    def holds(self, request: Request, where: str) -> bool:
        """Whether the cache holds a request at all.

        Raises:
            SpecError: the model does not attend to so many tokens.
        """
        total = request.prompt_tokens + request.new_tokens
        if total > self._model.max_sequence:
            raise SpecError(
                where, got=f"{total} tokens",
                expected=f"at most the {self._model.max_sequence} of {self._model.name}",
            )  # fmt: skip
        return total <= self.limits.cache_tokens

    def work_s(self, request: Request) -> float:
        """What a request weighs on this replica, for balancing."""
        return (request.prompt_tokens + request.new_tokens) / self._rate

    def serve(self, requests: Sequence[Request], queue: Sequence[int]) -> None:
        """Take every request of a queue through the pipeline."""
        batching = Batching(requests, queue, self.limits)
        clock = _Clock.of(len(self._ranks))
        while not batching.over:
            slot = min(clock.slots, key=lambda s: (s.ready_s, s.number))
            start = max(slot.ready_s, clock.free_s[0])
            found = batching.next_pass(slot.number, start)
            if found is not None:
                self._write(found, requests, start, clock)
            elif not batching.over:
                slot.ready_s = self._until(slot, clock.slots, batching)
        self.most_cached, self.most_held = batching.most_cached, batching.most_held

    def follow(self, requests: Sequence[Request], passes: Iterable[RequestPass]) -> None:
        """Write down passes of a real run, in the order in which the first stage began them."""
        clock = _Clock.of(len(self._ranks))
        for one in passes:
            slot = clock.slots[one.slot]
            self._write(one, requests, max(slot.ready_s, clock.free_s[0]), clock)

    def _until(self, slot: _Slot, slots: Sequence[_Slot], batching: Batching) -> float:
        """When an idle slot has to look again: at the next arrival or when another slot is back."""
        times = [s.ready_s for s in slots if batching.holds(s.number) and s is not slot]
        later = [t for t in times if t > slot.ready_s]
        if batching.next_arrival_s is not None:
            later.append(batching.next_arrival_s)
        # A slot that is back at this very moment looks first.
        return max(min(later), slot.ready_s) if later else math.nextafter(max(times), math.inf)

    def _write(
        self, one: RequestPass, requests: Sequence[Request], start: float, clock: _Clock
    ) -> None:
        """Emit a pass that begins when all of this lets it."""
        slot = clock.slots[one.slot]
        if one.ended:
            clock.freed = slot.back
        needed: tuple[int, ...] = ()
        if one.phase == PREFILL:
            needed = tuple(
                self._log.add(
                    requests[index].arrival_s, "arrive", self._first, Segment("arrive"),
                    microbatch=index, resources=(),
                )
                for index in one.members
            ) + ((clock.freed,) if clock.freed >= 0 else ())  # fmt: skip
        if slot.back >= 0 and slot.back not in needed:
            needed = (*needed, slot.back)
        clock.steps += 1
        longest = max(one.lengths)
        length = padded(longest, self._longest) if one.phase == PREFILL else longest
        slot.ready_s, last, slot.back = self._send_through(
            one.phase, len(one.members), length, start, needed, one.slot, clock
        )
        self._log.passes.append((self._number, one.members, one.phase, last))
        self._log.clock.append((slot.back, slot.ready_s))

    def _send_through(
        self, phase: str, count: int, length: int, start: float, needed: tuple[int, ...],
        slot: int, clock: _Clock,
    ) -> tuple[float, int, int]:  # fmt: skip
        """Emit a pass; (when it is back on the first stage, its last action, the return's)."""
        log, stages = self._log, len(self._ranks)
        at, done, arrived = start, -1, needed
        for stage in range(stages):
            if stage:
                at, done = self._hop(phase, count, length, stage - 1, stage, at, done, slot, clock)
                arrived = (done,)
            work, seconds = self._work(stage, phase, count, length)
            done = log.add(
                seconds, phase, self._first + stage, work, stage=stage, microbatch=slot,
                step=clock.steps, dependencies=arrived, resources=(COMPUTE,),
            )  # fmt: skip
            at = max(at, clock.free_s[stage]) + seconds
            clock.free_s[stage] = at
        last = done
        if stages > 1:
            at, done = self._hop(phase, count, 1, stages - 1, 0, at, done, slot, clock)
        return at, last, done

    def _hop(
        self, phase: str, count: int, length: int, source: int, target: int, at: float,
        after: int, slot: int, clock: _Clock,
    ) -> tuple[float, int]:  # fmt: skip
        tokens = count * (length if phase == PREFILL and target else 1)
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
            step=clock.steps, peer=self._first + target, dependencies=(after,),
            resources=(f"link:{source}>{target}",),
        )  # fmt: skip
        received = log.add(
            0.0, "recv", self._first + target, HostLaunch(0), stage=target, microbatch=slot,
            step=clock.steps, peer=self._first + source, dependencies=(sent,), resources=(),
        )  # fmt: skip
        at = max(at, clock.links.get((source, target), 0.0)) + seconds
        clock.links[source, target] = at
        return at, received

    def _pass_s(self, phase: str, count: int, length: int) -> list[float]:
        return [self._work(stage, phase, count, length)[1] for stage in range(len(self._ranks))]

    def _work(self, stage: int, phase: str, count: int, length: int) -> tuple[Segment, float]:
        """A stage's pass over ``count`` requests, padded or masked to a length, and its seconds.

        Between two multiples of `BUCKET` a decode step is interpolated, because attention is close
        to linear in the keys: few works have to be priced.
        """
        if phase == PREFILL:
            return self._priced(stage, phase, count, length)
        above = max(math.ceil(length / BUCKET), 1) * BUCKET
        work, seconds = self._priced(stage, phase, count, above)
        if length < above > BUCKET:
            below_s = self._priced(stage, phase, count, above - BUCKET)[1]
            seconds -= (above - length) / BUCKET * (seconds - below_s)
        return work, seconds

    def _priced(self, stage: int, phase: str, count: int, length: int) -> tuple[Segment, float]:
        key = (stage, phase, count, length)
        if key not in self._works:
            decided, kernels = self._decision.stages[stage], self._kernels[stage]
            update = {"prompt_tokens": length, "batch": count}
            pricing = Pricing(
                self._model, self._workload.model_copy(update=update), self._problem.costs,
                decided.degree,
            )  # fmt: skip
            sizes = MicroBatches(count, count)
            keys = None if phase == PREFILL else length
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
            seconds *= self._paces[stage]
            self._works[key] = (made, seconds)
        return self._works[key]


def cache_tokens(problem: Problem[Any], decision: ServingDecision) -> int:
    """Tokens whose keys and values fit every stage beside its weights and workspace."""
    w = problem.workload
    held = w.batch * (w.prompt_tokens + w.new_tokens)
    most = math.inf
    for ledger in ServingPlanner().memory(problem, decision):
        cache = ledger.items.get("kv_cache", 0)
        if cache:
            most = min(most, (cache + (ledger.free_bytes or 0)) // (cache / held))
    return int(most) if math.isfinite(most) else held
