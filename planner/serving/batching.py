"""`Batching`: the policy of a replica under traffic: which requests are in which pass.

As many batches are in flight as there are stages, each in a *slot*. When a batch is through the
pipeline, the requests that have ended leave it; if others wait and may be admitted, its next pass
is the prefill of the first of them (at most a prefill micro-batch of the plan), else a decode step
of all its requests. Admitted are as many at once as the plan's batch, the limit that an export sets
(``--max-num-seqs``), and as their caches fit; to one batch no more than the plan decodes together,
or an equal share if that is more, so that one does not take all and leave the other stages idle. A
request's whole cache is set aside then, so that none is ever put off again.

Time is told from outside: the simulation's own (`replica_server`) or that of a real run
(`live_server`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from foreplan.planner.serving.spec import ServingDecision
from foreplan.planner.serving.traffic import Request

#: Prompts of a pass are padded to a multiple of so many tokens. oneDNN makes a kernel for every
#: number of rows that a weight meets, which takes milliseconds, and 0.3 to 1.5 MiB that it keeps
#: (measured, three shapes in bf16): traffic would bring ever new ones.
BUCKET = 32


def padded(longest: int, planned: int) -> int:
    """Tokens that each prompt of a pass is padded to.

    Args:
        longest: tokens of the longest prompt.
        planned: tokens of the longest request that the plan is for, where padding ends.
    """
    return min(math.ceil(longest / BUCKET) * BUCKET, max(longest, planned))


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What a replica may hold.

    Attributes:
        slots: batches in flight, one a stage.
        batch: most requests at once.
        share: most requests of a slot.
        prefill: most requests of a prefill.
        cache_tokens: tokens whose keys and values fit.
    """

    slots: int
    batch: int
    share: int
    prefill: int
    cache_tokens: int

    @classmethod
    def of(cls, decision: ServingDecision, batch: int, cache_tokens: int) -> BatchLimits:
        """Those of a decision that was planned to hold ``batch`` requests together."""
        slots = len(decision.stages)
        share = max(decision.decode_microbatch, math.ceil(batch / slots))
        return cls(slots, batch, share, decision.prefill_microbatch, cache_tokens)


@dataclass(frozen=True, slots=True)
class RequestPass:
    """A pass of some requests through all stages.

    Attributes:
        slot: whose batch.
        phase: ``prefill`` or ``decode``.
        members: indices of the requests.
        lengths: tokens of each whose keys and values are known behind the pass.
        ended: requests that have left the slot since its last pass.
    """

    slot: int
    phase: Literal["prefill", "decode"]
    members: tuple[int, ...]
    lengths: tuple[int, ...]
    ended: tuple[int, ...]


class Batching:
    """See the module.

    Args:
        requests: of all replicas.
        queue: indices of those of this one, by arrival.
        limits: of this replica.

    Attributes:
        most_cached: largest share of the cache in use so far.
        most_held: most requests that were admitted at once so far.
    """

    def __init__(
        self, requests: Sequence[Request], queue: Sequence[int], limits: BatchLimits
    ) -> None:
        self._requests, self._limits = requests, limits
        self._coming = deque(queue)
        self._waiting: deque[int] = deque()
        # Of each slot its requests with the tokens made, those of the pass in flight counted.
        self._running: list[dict[int, int]] = [{} for _ in range(limits.slots)]
        self._left: list[list[int]] = [[] for _ in range(limits.slots)]
        self._cached = 0
        self.most_cached, self.most_held = 0.0, 0

    @property
    def over(self) -> bool:
        """Whether all requests have been served and have left."""
        return not (self._coming or self._waiting or any(self._running))

    @property
    def next_arrival_s(self) -> float | None:
        """When the next request comes that was not seen yet; ``None`` if none does."""
        return self._requests[self._coming[0]].arrival_s if self._coming else None

    def holds(self, slot: int) -> bool:
        """Whether a slot has requests."""
        return bool(self._running[slot])

    def next_pass(self, slot: int, now_s: float) -> RequestPass | None:
        """What a slot does that is not in flight.

        Args:
            slot: which.
            now_s: the time; requests that come later are not known yet.

        Returns:
            The pass, which counts as begun; ``None`` while there is nothing to do: ask again after
            the next arrival or when another slot is back.
        """
        running = self._running[slot]
        for index in [i for i, made in running.items() if made >= self._requests[i].new_tokens]:
            del running[index]
            self._left[slot].append(index)
            self._cached -= _size(self._requests[index])
        while self._coming and self._requests[self._coming[0]].arrival_s <= now_s:
            self._waiting.append(self._coming.popleft())
        taken = self._admitted(slot)
        if not taken and not running:
            return None
        ended = tuple(self._left[slot])
        self._left[slot].clear()
        if taken:
            running.update(dict.fromkeys(taken, 1))
            lengths = tuple(self._requests[i].prompt_tokens for i in taken)
            return RequestPass(slot, "prefill", tuple(taken), lengths, ended)
        lengths = tuple(self._requests[i].prompt_tokens + n for i, n in running.items())
        for index in running:
            running[index] += 1
        return RequestPass(slot, "decode", tuple(running), lengths, ended)

    def _admitted(self, slot: int) -> list[int]:
        """Requests that join a slot now."""
        limits, held = self._limits, sum(map(len, self._running))
        most = min(limits.prefill, limits.batch - held, limits.share - len(self._running[slot]))
        taken: list[int] = []
        while self._waiting and len(taken) < most:
            size = _size(self._requests[self._waiting[0]])
            if self._cached + size > limits.cache_tokens:
                break
            self._cached += size
            taken.append(self._waiting.popleft())
        self.most_cached = max(self.most_cached, self._cached / limits.cache_tokens)
        self.most_held = max(self.most_held, held + len(taken))
        return taken


def _size(request: Request) -> int:
    return request.prompt_tokens + request.new_tokens
