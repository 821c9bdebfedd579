"""`check_cost_source`: what `CostBook` takes for granted about its sources."""

from __future__ import annotations

import math
from collections.abc import Iterable

from foreplan.cost_models.costs import (
    SOURCES,
    Collective,
    CostBook,
    CostSource,
    Estimate,
    Segment,
    Work,
)
from foreplan.errors import MissingDataError
from foreplan.testing.contract import ContractError, require

_NOWHERE = "no-such-host/no-such-device"


def check_cost_source(source: CostSource, works: Iterable[Work], device: str) -> int:
    """Price works as a cost book would and check every answer.

    An answer is an `Estimate` with ``0 < low_s <= mean_s <= high_s``, all finite, and a known
    origin, ``None``, or a `MissingDataError` where no other source may price the work either; the
    same question gets the same answer, whatever was asked in between; a device that the source does
    not know gets ``None``, not an error; works that run back to back cost the sum of their prices.

    Args:
        source: what is checked.
        works: what to price, some of which it should know.
        device: a device that it knows.

    Returns:
        How many of the works it could price.

    Raises:
        ContractError: a promise does not hold, or it could price nothing.
    """
    who = f"{type(source).__name__}.estimate"
    asked = list(works)
    answers = [_answer(source, work, device) for work in asked]
    for work, answer in zip(asked, answers, strict=True):
        if answer is not None:
            _check_answer(who, work, answer)
        # A collective names its ranks itself.
        unknown = None if isinstance(work, Collective) else source.estimate(work, _NOWHERE)
        require(unknown is None, who, "answers None for a device that it does not know", unknown)
    again = [_answer(source, work, device) for work in reversed(asked)][::-1]
    require(again == answers, who, "gives the same answer to the same question", again)
    priced = [(w, a) for w, a in zip(asked, answers, strict=True) if a is not None]
    if not priced:
        raise ContractError(who, f"prices at least one of the {len(asked)} works", None)
    _check_in_book(source, priced, device)
    return len(priced)


def _answer(source: CostSource, work: Work, device: str) -> Estimate | None:
    """What is known of a work: a refusal is no price."""
    try:
        return source.estimate(work, device)
    except MissingDataError:
        return None


def _check_answer(who: str, work: Work, answer: Estimate) -> None:
    require(isinstance(answer, Estimate), who, f"returns an Estimate or None for {work}", answer)
    times = (answer.low_s, answer.mean_s, answer.high_s)
    sound = all(math.isfinite(t) for t in times) and 0 < times[0] <= times[1] <= times[2]
    require(sound, who, f"gives 0 < low_s <= mean_s <= high_s, in seconds, for {work}", answer)
    require(answer.source in SOURCES, who, f"names a source of {', '.join(SOURCES)}", answer.source)


def _check_in_book(source: CostSource, priced: list[tuple[Work, Estimate]], device: str) -> None:
    book = CostBook([source])
    for work, answer in priced:
        found = book.cost(work, device)
        require(found == answer, "CostBook.cost", f"hands on the source's price of {work}", found)
    parts = tuple((work, 2) for work, _ in priced if not isinstance(work, Segment))
    if parts:
        mean = book.cost(Segment("together", parts), device).mean_s
        wanted = sum(2 * book.cost(work, device).mean_s for work, _ in parts)
        require(
            math.isclose(mean, wanted, rel_tol=1e-9), "CostBook.cost",
            "prices works that run back to back as the sum of their prices", (mean, wanted),
        )  # fmt: skip
