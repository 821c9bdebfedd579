"""What the ranks of a live run are told, and what they say: plain records, without torch."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from foreplan.datasets.specs import StrictModel
from foreplan.planner.serving.batching import BatchLimits, RequestPass
from foreplan.planner.serving.spec import Count, ServingDecision
from foreplan.planner.serving.traffic import Request

_Index = Annotated[int, Field(ge=0)]
_Time = Annotated[int, Field(ge=0, lt=1 << 62)]


class LiveTraffic(StrictModel):
    """Requests of one run.

    Attributes:
        requests: arrival in seconds, tokens of the prompt and of the answer, of each.
        queues: indices of the requests of each replica, by arrival.
        batches: most requests that each replica holds.
        cache_tokens: tokens that each replica's cache holds.
    """

    requests: tuple[tuple[Annotated[float, Field(ge=0)], Count, Count], ...]
    queues: tuple[tuple[_Index, ...], ...]
    batches: tuple[Count, ...]
    cache_tokens: tuple[Count, ...]

    def known(self) -> tuple[Request, ...]:
        """The requests."""
        return tuple(Request(*row) for row in self.requests)

    def limits(self, number: int, decision: ServingDecision) -> BatchLimits:
        """Of a replica."""
        return BatchLimits.of(decision, self.batches[number], self.cache_tokens[number])


class LivePass(StrictModel):
    """A pass as it was: see `RequestPass`."""

    slot: _Index
    phase: Literal["prefill", "decode"]
    members: Annotated[tuple[_Index, ...], Field(min_length=1)]
    lengths: tuple[Count, ...]
    ended: tuple[_Index, ...]

    @classmethod
    def of(cls, one: RequestPass) -> Self:
        """To be told."""
        return cls(
            slot=one.slot, phase=one.phase, members=one.members, lengths=one.lengths,
            ended=one.ended,
        )  # fmt: skip

    def known(self) -> RequestPass:
        """As it was decided."""
        return RequestPass(self.slot, self.phase, self.members, self.lengths, self.ended)


class LiveRecord(StrictModel):
    """What one rank says of a run.

    Attributes:
        begin_ns: when its run began, by the host's monotonic clock, as all times.
        passes: the first stage's, in the order in which it began them; empty of other stages.
        compute_ns: start and end of every pass on this rank.
        received_ns: of what came to it, when it was waited for and when it was there; of the first
            stage the tokens. Empty where there is one stage.
        sent_ns: of what it sent, when that was posted and when it was known to be gone.
        most_cached, most_held: see `Batching`; 0 of other stages.
        tokens: of every request, of the first stage; others say none.
    """

    begin_ns: _Time
    passes: tuple[LivePass, ...] = ()
    compute_ns: tuple[tuple[_Time, _Time], ...]
    received_ns: tuple[tuple[_Time, _Time], ...] = ()
    sent_ns: tuple[tuple[_Time, _Time], ...] = ()
    most_cached: float = 0.0
    most_held: int = 0
    tokens: dict[int, tuple[int, ...]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _alike(self) -> LiveRecord:
        count = len(self.compute_ns)
        lengths = {len(times) for times in (self.received_ns, self.sent_ns)}
        if not lengths <= {0, count} or len(lengths) > 1 or len(self.passes) not in (0, count):
            raise ValueError("as many times of every sort as passes")
        return self
