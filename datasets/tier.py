"""Tier: how fast the ranks of a group reach each other, and how they slow one another.

A tier is one kind of road: NVLink inside a board, PCIe inside a host, the network between hosts.
``latency_s`` and ``bandwidth_bytes_per_s`` describe one message between two ranks; a collective
has its own fit for every (kind, number of ranks), because libraries switch algorithms and ring
formulas are off by integer factors (gloo's most of all). ``seconds = alpha + beta * payload``.

The payload of a collective, in bytes, is what one rank holds: the message (p2p, broadcast), the
tensor (all_reduce), the gathered result (all_gather), the input (reduce_scatter), all that one
rank sends (all_to_all).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.quantity import BytesPerSecond, Seconds
from foreplan.datasets.specs import StrictModel
from foreplan.errors import SpecError

CollectiveKind = Literal[
    "p2p", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"
]
Backend = Literal["gloo", "nccl"]
ContentionKind = Literal["memory", "compute", "training"]

EVERYONE = "all"
"""The word in `Tier.group` for every rank of the cluster."""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class CollectiveFit(StrictModel):
    """Measured time of one kind of collective over one number of ranks."""

    kind: CollectiveKind
    ranks: Annotated[int, Field(ge=2)] = 2
    alpha_s: Seconds
    """Time of an empty message, seconds."""
    beta_s_per_byte: Annotated[float, Field(ge=0)]
    """Seconds a byte of payload adds (the inverse of the bandwidth a rank sees)."""
    residual: Annotated[float, Field(ge=0)]
    """Median of |fit − measured| / measured over the samples."""
    samples: Annotated[int, Field(ge=1)]
    """Message sizes the fit saw."""
    compute_share: Annotated[float, Field(ge=0)] | None = None
    """Seconds that its ranks' computation loses to several of these beside it, over what they take
    alone: about 1 where the one core of a rank carries the bytes (gloo), more where they also push
    its data out of the caches. ``None`` where it was not measured: the tier's figure counts."""
    lag_share: Annotated[float, Field(ge=0)] | None = None
    """What its ranks wait for the slowest of them before it begins, over what they computed since
    they last met (`foreplan.datasets.ranks.lag`). ``None`` where it was not measured."""

    def seconds(self, payload_bytes: float) -> float:
        """Return the fitted time for a payload (see the module), in seconds."""
        return self.alpha_s + self.beta_s_per_byte * payload_bytes


class Tier(StrictModel):
    """One kind of link among a group of ranks."""

    group: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        BeforeValidator(_as_list),
        Field(strict=False, min_length=1),
    ]
    """Hosts, devices (``t4``, ``hosta/cuda:0``) or rank labels; or ``all``."""
    scope: Literal["host", "network"]
    """Joins ranks of one host with each other, or ranks of different hosts."""
    latency_s: Seconds
    bandwidth_bytes_per_s: BytesPerSecond
    """Of one message between two ranks, one direction."""
    collectives: Annotated[tuple[CollectiveFit, ...], Field(strict=False)] = ()
    waited: Annotated[tuple[CollectiveFit, ...], Field(strict=False)] = ()
    """Of collectives that their ranks compute nothing beside, where these go another way: among
    processors of one host through shared memory (`foreplan.datasets.ranks.host_group`). What has no
    fit here has that of ``collectives``."""
    compute_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """As of `CollectiveFit`, for collectives without a figure of their own; 0 if not measured."""
    backend: Backend | None = None
    """Library the figures were measured with; ``None`` for published or assumed ones."""
    emulated: bool = False
    """A slow tier made from a fast one (fewer channels, traffic shaping); say so in results."""
    source: Annotated[str, Field(min_length=1)]
    """Where the figures come from: the measurement's file, a data sheet, an assumption."""

    @field_validator("collectives", "waited")
    @classmethod
    def _each_fit_once(cls, fits: tuple[CollectiveFit, ...]) -> tuple[CollectiveFit, ...]:
        seen: set[tuple[str, int]] = set()
        for fit in fits:
            if (fit.kind, fit.ranks) in seen:
                raise ValueError(f"one fit for {fit.kind} over {fit.ranks} ranks")
            seen.add((fit.kind, fit.ranks))
        return fits

    @property
    def label(self) -> str:
        """Short name for tables and timelines: ``host: hosta``."""
        return f"{self.scope}: {', '.join(self.group)}"

    def fit(self, kind: CollectiveKind, ranks: int) -> CollectiveFit | None:
        """Return the fit for exactly this collective over this many ranks, if measured."""
        return next((f for f in self.collectives if f.kind == kind and f.ranks == ranks), None)

    def taken_beside(self, kind: str, ranks: int) -> float:
        """Return what computation loses to this collective beside it, over its own time."""
        fit = next((f for f in self.collectives if f.kind == kind and f.ranks == ranks), None)
        found = None if fit is None else fit.compute_share
        return self.compute_share if found is None else found

    def lag(self, kind: str, ranks: int) -> float:
        """Return what ranks wait for the slowest at a collective on the spot, over their work."""
        fit = next((f for f in self.waited if f.kind == kind and f.ranks == ranks), None)
        return 0.0 if fit is None or fit.lag_share is None else fit.lag_share


class ProgramInPass(StrictModel):
    """What one rank alone takes for a program in a pass, over its price by the profile."""

    device: Annotated[str, Field(min_length=1)]
    """The rank's name, without its host."""
    op: Annotated[str, Field(min_length=1)]
    dims: Mapping[str, Annotated[int, Field(ge=1)]]
    variant: str
    factor: Annotated[float, Field(gt=0)]

    @model_validator(mode="after")
    def _sound(self) -> ProgramInPass:
        try:
            self.program()
        except SpecError as error:
            raise ValueError(f"{error.expected} for {error.where}") from error
        return self

    def __hash__(self) -> int:
        return hash((self.device, self.op, self.variant, self.factor))

    def program(self) -> Program:
        """The program."""
        return program(self.op, Variant.parse(self.variant), **self.dims)


class Contention(StrictModel):
    """Measured slowdown of ranks that share a host and work at the same time."""

    kind: ContentionKind
    """What they do: work bound by memory bandwidth, by arithmetic (power, cores), or passes of a
    training step (`foreplan.datasets.ranks.together`)."""
    factors: Annotated[
        Mapping[Annotated[int, Field(ge=1)], Annotated[float, Field(gt=0)]], Field(min_length=1)
    ]
    """Ranks at work to time over the time alone; of passes over their price by the profile, which
    has a factor for one rank, too."""
    programs: Annotated[tuple[ProgramInPass, ...], Field(strict=False)] = ()
    """Of passes: the factor for one rank, program by program."""
    host: str | None = None
    """The host measured; ``None`` says it of every host."""
    source: str | None = None

    def __hash__(self) -> int:
        return hash((self.kind, self.host))  # a mapping has no hash
