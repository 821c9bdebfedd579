"""Meetings of GPUs before a collective, without GPUs: who waits for whom."""

from __future__ import annotations

import pytest
import torch
from memory_driver import Driver, Stream

from foreplan.planner.verify.meetings import Meetings, Members

GROUPS: tuple[Members, ...] = ((0, 1, 2), (0, 2))


def opened() -> list[Meetings]:
    ranks = [Meetings(GROUPS, rank, torch.device("cpu")) for rank in range(3)]
    words = [rank.words() for rank in ranks]
    for rank in ranks:
        rank.open(words)
    return ranks


def waits(rank: Meetings, members: Members) -> bool:
    """Whether its stream, which carries on here at once, would wait for somebody."""
    try:
        rank.meet(members, Stream())
    except RuntimeError as error:
        return "cuStreamWaitValue32" in str(error)
    return False


def test_only_the_last_to_come_need_not_wait(driver: Driver) -> None:
    first, second, third = opened()
    for _ in range(3):
        assert waits(third, GROUPS[0])
        assert waits(first, GROUPS[0])
        assert not waits(second, GROUPS[0])


def test_groups_meet_apart(driver: Driver) -> None:
    first, second, third = opened()
    assert waits(first, GROUPS[0])
    assert waits(third, GROUPS[1])
    assert not waits(first, GROUPS[1])
    assert waits(third, GROUPS[0])
    assert not waits(second, GROUPS[0])
    assert GROUPS[1] in first
    assert GROUPS[1] not in second


def test_memory_out_of_reach_is_said(driver: Driver) -> None:
    driver.fail = "cuIpcOpenMemHandle_v2"
    with pytest.raises(RuntimeError, match="cuIpcOpenMemHandle_v2: CUDA error 201"):
        opened()
