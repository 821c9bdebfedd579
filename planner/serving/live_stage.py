"""`LiveStage`: one stage of a replica in its rank's process, under traffic; imports torch.

The first stage asks `Batching` by the real clock, tells the other stages of every pass
(`LiveOrder`) and then begins it. What is computed goes down the stages, the tokens back to the
first.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from foreplan.datasets.models.model import Model
from foreplan.datasets.specs import validate
from foreplan.errors import SpecError
from foreplan.planner.base import Problem
from foreplan.planner.serving.batching import Batching, BatchLimits, RequestPass, padded
from foreplan.planner.serving.cache_rows import CacheRows, cache_rows
from foreplan.planner.serving.kernels import load_stage
from foreplan.planner.serving.live_line import LiveLine
from foreplan.planner.serving.live_order import LiveOrder
from foreplan.planner.serving.live_traffic import LivePass, LiveRecord, LiveTraffic
from foreplan.planner.serving.planner import serving_model
from foreplan.planner.serving.pricing import PREFILL
from foreplan.planner.serving.spec import ServingDecision
from foreplan.planner.serving.traffic import Request
from foreplan.planner.verify.clock import HostClock
from foreplan.planner.verify.gloo_channels import GlooChannels
from foreplan.planner.verify.request_stage import RequestStage


class LiveStage:
    """See the module.

    Args:
        model: the model.
        decision: of the replica.
        number: which replica of the plan it is.
        stage: which of its stages.
        first: rank of the run of its first stage.
        batch: most requests that it holds.
        positions: tokens of the longest request.
        mode: ``fast`` or ``reference``.
        seed: of prompts and random weights.

    Attributes:
        slots: batches in flight, one a stage.
        share: most requests of each.
        positions: see above.
    """

    def __init__(
        self, model: Model, decision: ServingDecision, number: int, stage: int, first: int, *,
        batch: int, positions: int, mode: str, seed: int,
    ) -> None:  # fmt: skip
        self._model, self._decision, self._number = model, decision, number
        self._place, self._first, self._seed = stage, first, seed
        limits = BatchLimits.of(decision, batch, 1)
        self.share, self.slots, self.positions = limits.share, limits.slots, positions
        self._dtype = torch.float32 if mode == "reference" else torch.bfloat16
        chosen = decision.stages[stage]
        self._stage = RequestStage(
            model, chosen.start, chosen.end, rows=cache_rows(limits)[0], positions=positions,
            reference=mode == "reference",
        )  # fmt: skip
        load_stage(self._stage, model, chosen, seed)

    @classmethod
    def of(
        cls, problem: Problem[Any], replicas: Sequence[tuple[ServingDecision, int]], rank: int,
        mode: str,
    ) -> LiveStage:  # fmt: skip
        """The stage of a rank.

        Args:
            problem: of the plan.
            replicas: each with the most requests that it holds at once; ranks are numbered replica
                by replica, stage by stage.
            rank: which.
            mode: as above.
        """
        w, first = problem.workload, 0
        for number, (decision, batch) in enumerate(replicas):
            if rank < first + len(decision.stages):
                return cls(
                    serving_model(problem), decision, number, rank - first, first, batch=batch,
                    positions=w.prompt_tokens + w.new_tokens, mode=mode, seed=problem.seed,
                )  # fmt: skip
            first += len(decision.stages)
        raise SpecError("rank", got=rank, expected=f"0..{first - 1}")

    def memory_bytes(self) -> dict[str, int]:
        """Bytes held, by the ledger's items."""
        return {name: size for name, size in self._stage.memory_bytes().items() if size}

    def serve(
        self, given: Mapping[str, Any], channels: Callable[[HostClock], GlooChannels],
        meet: Callable[[], None],
    ) -> dict[str, Any]:  # fmt: skip
        """Take part in a run; see `foreplan.planner.base.Live`.

        Args:
            given: `LiveTraffic`; the first stage sees of it what has come.
            channels: to the other ranks, made for a clock.
            meet: returns when every rank is about to begin.

        Returns:
            `LiveRecord`.
        """
        traffic = validate(LiveTraffic, given, "traffic")
        return self._serve(traffic, channels, meet).model_dump(mode="json")

    def _serve(
        self, traffic: LiveTraffic, channels: Callable[[HostClock], GlooChannels],
        meet: Callable[[], None],
    ) -> LiveRecord:  # fmt: skip
        requests = traffic.known()
        queue = traffic.queues[self._number]
        # Each request has one prefill at most, and a pass makes a token of it at least.
        most = sum(requests[i].new_tokens for i in queue)
        ring = range(self._first, self._first + self.slots)
        line = LiveLine(channels, ring, self._place, most)
        prompts = {
            i: prompt_of(self._model, self._seed, i, requests[i].prompt_tokens) for i in queue
        }
        collecting = gc.isenabled()
        gc.collect(1)
        gc.disable()  # a collection in the middle would be timed as somebody's compute
        try:
            meet()
            if self._place == 0:
                limits = traffic.limits(self._number, self._decision)
                rows = cache_rows(limits)[1]
                return _First(self, line, Batching(requests, queue, limits), rows, prompts).run()
            return self._follow(line, time.monotonic_ns())
        finally:
            if collecting:
                gc.enable()

    def carry_out(self, order: LiveOrder, x: Tensor) -> Tensor:
        """Move rows and take a pass through the stage."""
        for move in order.moves:
            self._stage.move(*move)
        if order.phase == PREFILL:
            return self._stage.fill(order.first, order.lengths, order.tokens, x)
        return self._stage.extend(order.first, order.lengths, x)

    def _follow(self, line: LiveLine, begin_ns: int) -> LiveRecord:
        """Carry out what the first stage tells, until it says that this was all."""

        def buffer(told: Tensor) -> Tensor | None:
            order = LiveOrder.read(told)
            if order is None:
                return None
            return torch.empty(order.rows, self._model.hidden, dtype=self._dtype)

        line.listen(LiveOrder.size(self.share), buffer)
        while (begun := line.begun()) is not None:
            order = LiveOrder.read(begun[0])
            assert order is not None  # it had a buffer
            with line.computing():
                made = self.carry_out(order, begun[1])
            line.send(made)
        computed, received, sent = line.times()
        return LiveRecord(
            begin_ns=begin_ns, compute_ns=computed, received_ns=received, sent_ns=sent
        )


class _First:
    """The first stage's part of a run."""

    def __init__(
        self, stage: LiveStage, line: LiveLine, batching: Batching, rows: Sequence[CacheRows],
        prompts: dict[int, Tensor],
    ) -> None:  # fmt: skip
        self._stage, self._line = stage, line
        self._batching, self._rows, self._prompts = batching, rows, prompts
        self._lengths: dict[int, int] = {}
        self._tokens: dict[int, list[int]] = {index: [] for index in prompts}
        self._passes: list[RequestPass] = []

    def run(self) -> LiveRecord:
        """Serve every request."""
        line, batching = self._line, self._batching
        ready: deque[int] = deque(range(self._stage.slots))
        idle: list[int] = []
        begin_ns = time.monotonic_ns()

        def now_s() -> float:
            return (time.monotonic_ns() - begin_ns) / 1e9

        while not batching.over:
            patience: float | None = 0.0
            if not ready:
                arrival = batching.next_arrival_s if idle else None
                patience = None if arrival is None else max(arrival - now_s(), 0.0)
            back = line.back(patience)
            if back is not None:
                self._keep(*back)
                ready.append(back[0])
            if back is not None or not ready:  # a place is free, or somebody has come
                ready.extend(idle)
                idle.clear()
            slot = ready.popleft()
            found = batching.next_pass(slot, now_s())
            if found is None:
                idle.append(slot)
            elif (made := self._begin(found)) is not None:
                self._keep(slot, *made)
                ready.append(slot)
        if self._stage.slots > 1:
            line.send_order(LiveOrder.stop(self._stage.share))
        computed, received, sent = line.times()
        return LiveRecord(
            begin_ns=begin_ns, passes=tuple(map(LivePass.of, self._passes)), compute_ns=computed,
            received_ns=received, sent_ns=sent, most_cached=batching.most_cached,
            most_held=batching.most_held,
            tokens={index: tuple(made) for index, made in self._tokens.items()},
        )  # fmt: skip

    def _begin(self, one: RequestPass) -> tuple[tuple[int, ...], Tensor] | None:
        """Begin a pass; its requests by row and their tokens where there is no other stage."""
        rows, line, several = self._rows[one.slot], self._line, self._stage.slots > 1
        moves = tuple((a, b, self._lengths[i]) for a, b, i in rows.drop(one.ended))
        first = rows.add(one.members) if one.phase == PREFILL else rows.first
        members = one.members if one.phase == PREFILL else rows.members
        known = dict(zip(one.members, one.lengths, strict=True))
        self._lengths.update(known)
        lengths = tuple(known[i] for i in members)
        tokens = padded(max(lengths), self._stage.positions) if one.phase == PREFILL else 1
        order = LiveOrder(one.phase, first, tokens, lengths, moves)
        if several:
            line.send_order(order.write(self._stage.share))
        if one.phase == PREFILL:
            x = torch.zeros(len(members), tokens, dtype=torch.int64)
            for row, index in enumerate(members):
                x[row, : known[index]] = self._prompts[index]
        else:
            x = torch.tensor([self._tokens[index][-1] for index in members])
        self._passes.append(one)
        with line.computing():
            made = self._stage.carry_out(order, x)
        if not several:
            return members, made
        line.send(made)
        line.expect_tokens(one.slot, members, torch.empty(len(members), dtype=torch.int64))
        return None

    def _keep(self, _: int, members: tuple[int, ...], made: Tensor) -> None:
        for index, token in zip(members, made.tolist(), strict=True):
            self._tokens[index].append(token)


def prompt_of(model: Model, seed: int, index: int, tokens: int) -> Tensor:
    """Token ids of a request's prompt, the same in every run: int64 ``[tokens]``."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
    return torch.randint(model.vocab, (tokens,), generator=generator)


def tokens_alone(
    problem: Problem[Any], replicas: Sequence[tuple[ServingDecision, int]],
    given: Mapping[str, Any],
) -> dict[str, list[int]]:  # fmt: skip
    """What each request is answered where it is served alone, in this process.

    Args:
        problem: of the plan.
        replicas: as of `LiveStage.of`.
        given: `LiveTraffic`.

    Returns:
        Tokens by request, in fp32 on the dequantised weights.
    """
    traffic, found = validate(LiveTraffic, given, "traffic"), {}
    for (decision, _), queue in zip(replicas, traffic.queues, strict=True):
        if queue:
            found.update(_alone(problem, decision, traffic.known(), queue))
    return found


def _alone(
    problem: Problem[Any], decision: ServingDecision, requests: Sequence[Request],
    queue: Sequence[int],
) -> dict[str, list[int]]:  # fmt: skip
    model, seed = serving_model(problem), problem.seed
    positions = max(requests[i].prompt_tokens + requests[i].new_tokens for i in queue)
    stages = []
    for chosen in decision.stages:
        stage = RequestStage(
            model, chosen.start, chosen.end, rows=1, positions=positions, reference=True
        )
        load_stage(stage, model, chosen, seed)
        stages.append(stage)
    found: dict[str, list[int]] = {}
    for index in queue:
        length, made = requests[index].prompt_tokens, []
        x = prompt_of(model, seed, index, length)[None]
        for stage in stages:
            x = stage.fill(0, (length,), length, x)
        made.append(int(x))
        while len(made) < requests[index].new_tokens:
            for stage in stages:
                x = stage.extend(0, (length + len(made),), x)
            made.append(int(x))
        found[str(index)] = made
    return found
