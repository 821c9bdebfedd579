"""`process_sketches`: what a verification would start, for its dry run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from foreplan.datasets.timing.worker_environment import worker_environment
from foreplan.errors import SpecError
from foreplan.planner.verify.candidates import Candidate
from foreplan.planner.verify.placement import assign_cores


@dataclass(frozen=True)
class ProcessSketch:
    """A process that a run would start.

    Attributes:
        candidate: decision it belongs to.
        rank: its rank.
        label, device, host: what it would be, and where.
        cores: cores it would keep to; () for a host other than this one.
        environment: variables that differ from this process's.
        capacity_bytes: memory cap, ``None`` for none.
        memory_bytes: what it is predicted to hold.
        predicted_s: predicted time of one run of its candidate, ``None`` where there is none.
    """

    candidate: str
    rank: int
    label: str
    device: str
    host: str
    cores: tuple[int, ...]
    environment: Mapping[str, str]
    capacity_bytes: int | None
    memory_bytes: int
    predicted_s: float | None = None


def process_sketches(candidates: Sequence[Candidate], here: str) -> tuple[ProcessSketch, ...]:
    """The processes of all candidates.

    Args:
        candidates: what would be run.
        here: name of this host in the cluster.
    """
    found = []
    for candidate in candidates:
        beside = [rank for rank in candidate.ranks if rank.host == here]
        try:
            cores = dict(
                zip(
                    [rank.index for rank in beside],
                    assign_cores([rank.name for rank in beside]),
                    strict=True,
                )
            )
        except SpecError:
            cores = {}
        for i, rank in enumerate(candidate.ranks):
            changed: dict[str, str] = {}
            if rank.name.kind != "zoo":
                wanted = worker_environment(rank.name)
                changed = {k: v for k, v in wanted.items() if os.environ.get(k) != v}
            found.append(
                ProcessSketch(
                    candidate.name, i, rank.label, str(rank.name), rank.host,
                    cores.get(rank.index, ()), MappingProxyType(changed), candidate.capacities[i],
                    candidate.memory_bytes[i],
                    None if candidate.predicted is None else candidate.predicted.total_s,
                )
            )  # fmt: skip
    return tuple(found)
