"""`Traffic`: requests with their arrivals and lengths, drawn from histograms or read from a trace.

A trace is CSV with the columns ``arrived_at_s,prompt_tokens,new_tokens``; the names of the public
traces that Vidur ships (``arrived_at,num_prefill_tokens,num_decode_tokens``) are read as well.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, field_validator

from foreplan.datasets.specs import StrictModel, load_document, validate
from foreplan.errors import SpecError
from foreplan.planner.serving.spec import Count

#: Most requests that are replayed.
MOST_REQUESTS = 100_000
_NAMES = {
    "arrived_at_s": "arrived_at_s", "arrived_at": "arrived_at_s", "prompt_tokens": "prompt_tokens",
    "num_prefill_tokens": "prompt_tokens", "new_tokens": "new_tokens",
    "num_decode_tokens": "new_tokens",
}  # fmt: skip
_TOO_LONG = 1 << 24

Histogram = dict[int, Annotated[float, Field(ge=0)]]


@dataclass(frozen=True, slots=True)
class Request:
    """One request: when it comes (seconds), tokens of its prompt, and of its answer.

    ``source`` says to people where it stands; requests that differ in nothing else are equal.
    """

    arrival_s: float
    prompt_tokens: int
    new_tokens: int
    source: str = field(default="", compare=False)


class Traffic(StrictModel):
    """Requests to draw.

    Attributes:
        requests: how many.
        rate_per_s: mean number that arrives in a second.
        arrivals: ``poisson`` (independent of each other), ``even``, or ``together`` (all at once).
        prompt_tokens, new_tokens: share of each length, or one length; drawn independently.
        seed: of the draws.
    """

    requests: Annotated[int, Field(gt=0, le=MOST_REQUESTS)]
    rate_per_s: Annotated[float, Field(gt=0, lt=1e9)]
    arrivals: Literal["poisson", "even", "together"] = "poisson"
    prompt_tokens: Histogram
    new_tokens: Histogram
    seed: Annotated[int, Field(ge=0)] = 0

    @field_validator("prompt_tokens", "new_tokens", mode="before")
    @classmethod
    def _histogram(cls, value: object) -> object:
        if type(value) is int:
            return {value: 1.0}
        if not isinstance(value, Mapping):
            raise ValueError("a number of tokens, or shares of several: {32: 0.6, 64: 0.4}")
        return {int(k) if isinstance(k, str) and k.isdigit() else k: v for k, v in value.items()}

    @field_validator("prompt_tokens", "new_tokens")
    @classmethod
    def _sound(cls, value: Histogram) -> Histogram:
        if not value or not sum(value.values()) > 0 or not all(0 < k < _TOO_LONG for k in value):
            raise ValueError("lengths above 0 with shares that do not sum to 0")
        return value

    def draw(self) -> tuple[Request, ...]:
        """The requests, by arrival."""
        rng = np.random.default_rng(self.seed)
        if self.arrivals == "together":
            times = np.zeros(self.requests)
        elif self.arrivals == "even":
            times = np.arange(self.requests) / self.rate_per_s
        else:
            times = np.cumsum(rng.exponential(1 / self.rate_per_s, self.requests))
        lengths = [_drawn(rng, h, self.requests) for h in (self.prompt_tokens, self.new_tokens)]
        return tuple(
            Request(float(t), int(p), int(n)) for t, p, n in zip(times, *lengths, strict=True)
        )


def _drawn(rng: np.random.Generator, histogram: Histogram, count: int) -> np.ndarray:
    shares = np.array(list(histogram.values()))
    return rng.choice(np.array(list(histogram)), size=count, p=shares / shares.sum())


class _Row(StrictModel):
    arrived_at_s: Annotated[float, Field(ge=0, lt=1e9)]
    prompt_tokens: Count
    new_tokens: Count


def load_traffic(path: str | os.PathLike[str], *, rate_per_s: float | None = None) -> tuple[
    Request, ...
]:  # fmt: skip
    """Requests of a description (YAML, JSON) or of a trace (CSV), by arrival.

    Args:
        path: the file.
        rate_per_s: mean rate instead of the file's; a trace's times are stretched.

    Raises:
        SpecError: no such file, a wrong field or row, or no request.
    """
    where = Path(path)
    if rate_per_s is not None and not 0 < rate_per_s < 1e9:
        raise SpecError(
            "--rate", got=rate_per_s, expected="requests a second, above 0 and below 1e9"
        )
    if where.suffix.lower() != ".csv":
        document = dict(load_document(where))
        if rate_per_s is not None:
            document["rate_per_s"] = rate_per_s
        described = validate(Traffic, document, where.name)
        if rate_per_s is not None and described.arrivals == "together":
            raise _at_once(rate_per_s)
        return tuple(replace(request, source=where.name) for request in described.draw())
    try:
        reader = csv.DictReader(io.StringIO(where.read_text(encoding="utf-8-sig")), strict=True)
        rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        got = getattr(error, "strerror", None) or str(error)
        raise SpecError(str(where), got=got, expected="a CSV file of requests") from None
    if not 0 < len(rows) <= MOST_REQUESTS:
        raise SpecError(where.name, got=f"{len(rows)} requests", expected=f"1..{MOST_REQUESTS}")
    header = [name for name in reader.fieldnames or () if name]
    known = [_NAMES[name.strip()] for name in header if name.strip() in _NAMES]
    if sorted(known) != sorted(_Row.model_fields):
        raise SpecError(
            f"{where.name}: header", got=",".join(header),
            expected="the columns arrived_at_s,prompt_tokens,new_tokens, each once",
        )  # fmt: skip
    found = []
    for line, row in rows:
        at = f"{where.name}: line {line}"
        if None in row:  # where the reader puts what no column has a name for
            raise SpecError(
                at, got=f"{len(reader.fieldnames or ()) + len(row[None])} cells",
                expected=f"the header's {len(reader.fieldnames or ())}",
            )  # fmt: skip
        fields = {
            _NAMES[n.strip()]: _number(v) for n, v in row.items() if n and n.strip() in _NAMES
        }
        read = validate(_Row, fields, at)
        found.append(Request(read.arrived_at_s, read.prompt_tokens, read.new_tokens, at))
    found.sort(key=lambda request: request.arrival_s)
    first, last = found[0].arrival_s, found[-1].arrival_s
    scale = 1.0
    if rate_per_s is not None:
        if not last > first:
            raise _at_once(rate_per_s)
        scale = (len(found) - 1) / (last - first) / rate_per_s
    return tuple(replace(r, arrival_s=(r.arrival_s - first) * scale) for r in found)


def _at_once(rate_per_s: float) -> SpecError:
    return SpecError(
        "--rate", got=rate_per_s, expected="requests that come one after another: these come at "
        "once, at no rate",
    )  # fmt: skip


def _number(word: object) -> object:
    for read in (int, float):
        try:
            return read(str(word))
        except ValueError:
            continue
    return word
