"""`Parts`: works with counts, before they become the segment of an action."""

from __future__ import annotations

from foreplan.cost_models.costs import HostLaunch, Segment, Work

Parts = tuple[tuple[Work, int], ...]


def joined(*several: Parts) -> Parts:
    """Parts one after another, equal works counted together."""
    counts: dict[Work, int] = {}
    for parts in several:
        for work, count in parts:
            counts[work] = counts.get(work, 0) + count
    return tuple(counts.items())


def times(parts: Parts, count: int) -> Parts:
    """Every part ``count`` times as often."""
    return tuple((work, n * count) for work, n in parts)


def segment(name: str, *several: Parts) -> Work:
    """One work that consists of several parts; nothing at all is free."""
    parts = joined(*several)
    return Segment(name, parts) if parts else HostLaunch(0)
