from __future__ import annotations

from typing import cast

import bubble_cases as cases
import numpy as np
import pytest
import torch

from foreplan.datasets.ranks.host_group import HostGroup
from foreplan.errors import SpecError
from foreplan.planner.bubbles.execution.lanes import Lanes
from foreplan.planner.bubbles.execution.layers import AttentionHalf, MlpHalf, Rotation
from foreplan.planner.bubbles.towers import backbone_tower
from foreplan.planner.bubbles.widen import widen
from foreplan.planner.verify.rank_program import rank_programs


def test_shards_of_all_lanes_make_the_whole() -> None:
    whole = torch.arange(2 * 12.0).view(2, 12)
    rebuilt = torch.zeros_like(whole)
    for lane in (0, 1):
        shard = Lanes(2, lane).cut(1, 4, 6, 2)
        assert shard is not None
        part = shard.take(whole)
        assert part.shape == (2, shard.size) == (2, 6)
        assert shard.shape(part.shape) == (2, 12)
        shard.put(rebuilt, part)
    assert torch.equal(rebuilt, whole)
    assert Lanes().cut(0, 3) is None
    with pytest.raises(SpecError, match="tp: got 2, expected a divisor of 3"):
        Lanes(2, 0).cut(0, 3)


def test_each_lane_holds_its_part_of_a_layer() -> None:
    tower = backbone_tower(cases.problem(2, [cases.encoder()]))
    attention, mlp = AttentionHalf(tower, Rotation(), Lanes(2, 1)), MlpHalf(tower, Lanes(2, 1))
    assert attention.qkv.weight.shape == (24, 16)
    assert attention.out.weight.shape == (16, 8)
    assert mlp.up.weight.shape == (24, 16)  # half of the gate, half of the rest
    assert mlp.down.weight.shape == (16, 12)
    with pytest.raises(SpecError, match="divisor of 2 heads"):
        AttentionHalf(tower, Rotation(), Lanes(4, 0))


class _Shared:
    """Stands in for memory that lanes share: the other lane has the same."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        tensor.mul_(2)


@pytest.mark.parametrize("way", ["enter", "leave"])
def test_lanes_sum_on_the_spot_through_shared_memory(way: str) -> None:
    lanes = Lanes(2, 0, host=cast(HostGroup, _Shared()))  # no group: gloo would raise
    x = torch.ones(3, 4, requires_grad=True)
    made = getattr(lanes, way)(x * 1)
    made.sum().backward()
    forwards, backwards = (1.0, 2.0) if way == "enter" else (2.0, 1.0)
    assert torch.equal(made, torch.full((3, 4), forwards))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3, 4), backwards))


def test_a_widened_schedule_runs_every_lane_and_connects_equal_ones() -> None:
    problem = cases.problem(4, [cases.encoder()])
    decision = cases.decision(problem, "1f1b", ranks=2, encoder_ranks=[[[0], [1]]], tp=2)
    wide = cases.schedule_of(problem, decision)
    assert wide.ranks == 4
    rank_programs(wide)  # every transfer has its other end
    lists = [[wide[i] for i in wide.of_rank(r)] for r in range(4)]
    for r in range(4):
        assert [a.label for a in lists[r]] == [a.label for a in lists[r - r % 2]]
        assert {a.peer % 2 for a in lists[r] if a.peer >= 0} == {r % 2}
    meetings = np.unique(wide.rendezvous[wide.rendezvous >= 0], return_counts=True)[1]
    assert set(meetings.tolist()) == {2}
    with pytest.raises(SpecError, match="4 ranks of 3 lanes"):
        widen(wide, ["a"], 3)
