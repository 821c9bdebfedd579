"""Connections between GPUs, with stand-ins for torch's streams and NCCL."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.cost_models.costs import HostLaunch
from foreplan.cost_models.schedule import Schedule
from foreplan.cost_models.schedule_builder import ScheduleBuilder
from foreplan.errors import VerificationError
from foreplan.planner.verify import channels, nccl_channels
from foreplan.planner.verify.clock import CudaClock
from foreplan.planner.verify.connections import Connections
from foreplan.planner.verify.rank_program import rank_programs

FREE = HostLaunch(0)
#: As torch has them: c10/cuda/CUDAStream.cpp.
STREAMS = 32


class Cuda:
    """``torch.cuda``'s streams: of each priority the same ones in turn."""

    def __init__(self) -> None:
        self.given: list[tuple[int, int]] = []

    def Stream(self, device: Any = None, priority: int = 0) -> Any:
        count = sum(kind == priority for kind, _ in self.given)
        self.given.append((priority, count % STREAMS))
        return SimpleNamespace(cuda_stream=self.given[-1])

    def synchronize(self, device: Any = None) -> None: ...


class Nccl:
    """Groups whose communicators take a stream of priority 0 at their first message."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.groups: dict[tuple[int, ...], Any] = {}
        self.streams: set[tuple[int, int]] = set()
        self.made: list[tuple[int, ...]] = []
        self.first_messages: list[tuple[int, ...]] = []

    def new_group(self, ranks: list[int], **_: Any) -> Any:
        self.made.append(tuple(ranks))

        def message(*_: Any) -> Any:
            self.first_messages.append(tuple(ranks))
            return SimpleNamespace(wait=lambda: None)

        group = SimpleNamespace(warm=False, send=message, recv=message)
        return self.groups.setdefault(tuple(ranks), group)

    def all_reduce(self, tensor: Any, group: Any) -> None:
        if not group.warm:
            group.warm = True
            self.streams.add(self.cuda.Stream().cuda_stream)

    def in_parts(self, out: Any, tensor: Any, group: Any) -> None:
        assert group.warm


def exchanging(peers: int) -> Schedule:
    """Rank 0 sends to every other rank, hears from each, and sums with each."""
    builder = ScheduleBuilder(["cpu"] * (peers + 1))
    for peer in range(1, peers + 1):
        for a, b in ((0, peer), (peer, 0)):
            sent = builder.add("send", a, FREE, stage=b, microbatch=peer, peer=b, resources=())
            builder.add(
                "recv", b, FREE, stage=b, microbatch=peer, peer=a, dependencies=[sent], resources=()
            )
        for rank in (0, peer):
            builder.add("all_reduce", rank, FREE, resources=("dp",), rendezvous=peer)
    return builder.build()


@contextlib.contextmanager
def gpus() -> Iterator[tuple[Cuda, Nccl]]:
    import torch
    import torch.distributed as dist

    cuda = Cuda()
    nccl = Nccl(cuda)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "cuda", cuda)
        patch.setattr(dist, "new_group", nccl.new_group)
        patch.setattr(dist, "all_reduce", nccl.all_reduce)
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            patch.setattr(dist, name, nccl.in_parts)
        # No GPU reaches another one's memory, so that messages are NCCL's, too.
        patch.setattr(nccl_channels, "exchange", lambda mine: [mine])
        patch.setattr(nccl_channels, "pair_options", lambda timeout: None)
        yield cuda, nccl


def open_connections(peers: int, rank: int = 0, kept: Connections | None = None) -> None:
    import torch

    programs = rank_programs(exchanging(peers), ordered=True)
    opened = channels.connect(
        programs, rank, backend="nccl", clock=object.__new__(CudaClock),
        device=torch.device("cpu"), timeout_s=1.0, kept=kept,
    )  # fmt: skip
    opened.prepare([], None)


@given(runs=st.lists(st.integers(1, 10), min_size=1, max_size=12))
def test_no_connection_shares_a_stream(runs: list[int]) -> None:
    """Whatever a process has run before: a wait for a message holds nothing else up."""
    with gpus() as (cuda, nccl):
        for peers in runs:
            former = len(cuda.given)
            open_connections(peers)
            mine = [one for one in cuda.given[former:] if one not in nccl.streams]
            assert len(mine) == len(set(mine)) == 3 * peers
        assert nccl.streams


def test_more_connections_than_streams_are_refused() -> None:
    with gpus():
        open_connections(10)
        with pytest.raises(VerificationError, match="rank 0 has more connections than torch has"):
            open_connections(11)


@given(plans=st.lists(st.integers(1, 6), min_size=1, max_size=20))
def test_plans_share_what_they_have_in_common(plans: list[int]) -> None:
    """Every rank opens the same groups in the same order, and each of them once."""
    made, ranks = [], max(plans) + 1
    for rank in range(ranks):
        kept = Connections()
        with gpus() as (cuda, nccl):
            for done, peers in enumerate(plans, 1):
                open_connections(peers, rank, kept)
                pairs = [(0, peer) for peer in range(1, max(plans[:done]) + 1)]
                mine = [pair for pair in pairs if rank in pair]
                # Messages in both directions, and sums, whose first message is a sum.
                assert sorted(nccl.made) == sorted(3 * pairs)
                assert sorted(nccl.first_messages) == sorted(2 * mine)
                assert sum(kind < 0 for kind, _ in cuda.given) == 3 * len(mine)
            made.append(nccl.made)
    assert made == [made[0]] * ranks


@given(between=st.integers(0, 3 * STREAMS))
def test_kept_streams_are_not_handed_out_again(between: int) -> None:
    """Whoever else has taken streams in the meantime."""
    kept = Connections()
    with gpus() as (cuda, _):
        import torch

        device = torch.device("cpu")
        first = kept.streams(20, device)
        for _ in range(between):
            cuda.Stream(priority=-1)
        every = kept.streams(STREAMS + 1, device)
        assert every[:20] == first
        assert len({stream.cuda_stream for stream in every}) == len(every) == STREAMS
        assert kept.streams(5, device) == first[:5]
