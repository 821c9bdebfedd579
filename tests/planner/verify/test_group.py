"""What the leader makes of the order in which it hears about the end of a process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from foreplan.planner.verify.group import Group, Peer, RankFailed
from foreplan.planner.verify.launch import Fleet
from foreplan.planner.verify.session import Job

Event = Callable[[Peer], None]


class Told:
    """A fleet that hears one event of the first rank at each pump."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.local = SimpleNamespace(tail=lambda member: "")
        self.group = Group(cast(Fleet, self), 0, [cast(Job, SimpleNamespace(label="a"))], [0])
        self.group.peers[0].wire = cast(Any, object())
        self._events = list(events)

    def pump(self, timeout_s: float) -> None:
        if self._events:
            self._events.pop(0)(self.group.peers[0])
        else:
            time.sleep(min(timeout_s, 0.01))


def exited(peer: Peer) -> None:
    peer.how, peer.lost_at = "it exited with code 0", time.monotonic()


def answered(peer: Peer) -> None:
    peer.inbox.append({"reference": 7})


def closed(peer: Peer) -> None:
    peer.closed, peer.lost_at = True, peer.lost_at or time.monotonic()


@pytest.mark.parametrize(
    "events", [(answered, closed, exited), (exited, answered, closed), (answered, exited, closed)]
)
def test_an_answer_counts_though_the_end_is_heard_of_first(events: tuple[Event, ...]) -> None:
    assert Told(events).group.gather("reference", 60.0) == [{"reference": 7}]


def test_an_end_without_an_answer_is_named_when_all_has_been_heard() -> None:
    with pytest.raises(RankFailed, match=r"rank 0 \(a\): it exited with code 0"):
        Told([exited, closed]).group.gather("reference", 60.0)


def test_a_host_that_says_nothing_more_is_not_waited_for() -> None:
    with pytest.raises(RankFailed, match="exited with code 0"):
        Told([exited]).group.gather("reference", 60.0)
