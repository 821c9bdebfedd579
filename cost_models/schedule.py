"""`Schedule`: per rank an ordered list of `Action`; simulated, executed, drawn and exported as is.

Semantics, the same for the simulator and for the runtime of ``planner/verify``:

- An action starts when every action it depends on has ended, and when every earlier action of its
  rank that shares one of its *resources* has ended. So a resource of a rank (``compute``,
  ``send:1``) is a queue served in list order; actions without a common resource may overlap.
- Actions that carry the same *rendezvous* number (a collective, one action a rank) start together,
  when all of them could.
- A resource that starts with ``shared:`` is one queue for all ranks, served in the order in which
  actions become ready (a link tier, a disk); at one moment, lower ranks and then earlier places in
  the rank's list go first.
- ``memory`` allocates at the start and frees at the end of the action.

Storage is by column, so that schedules with millions of actions stay cheap; `Action` is the view
of one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from foreplan.cost_models.costs import Work
from foreplan.errors import SpecError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

COMPUTE = "compute"
#: Queue of the host that issues what a device runs.
HOST = "host"
SHARED_PREFIX = "shared:"
#: Most actions of a schedule: half a kilobyte each while it is built.
MOST_ACTIONS = 2_000_000


def refuse_long(actions: int) -> None:
    """Refuse a schedule of so many actions, best before any is built.

    Raises:
        SpecError: more than `MOST_ACTIONS`.
    """
    if actions > MOST_ACTIONS:
        raise SpecError(
            "schedule", got=f"more than {MOST_ACTIONS} actions", expected="fewer",
            fix="larger micro-batches, or fewer of them (samples, tokens, steps)",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that an action allocates when it starts and frees when it ends.

    Attributes:
        item: line of the ledger (``activations``, ``kv_cache``).
        allocate_bytes: taken at the start.
        free_bytes: given back at the end, also of what earlier actions took.
    """

    item: str
    allocate_bytes: int = 0
    free_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one rank.

    Attributes:
        op: what it is to the planner's kernels (``F``, ``prefill``, ``send``, ``recv``); the words
            ``send``, ``recv`` and the collectives' names are executed by the runtime itself.
        rank: who runs it.
        work: what it costs, priced on the rank's device.
        stage: pipeline stage or model chunk, -1 where it has none.
        microbatch: -1 where it has none.
        step: token or training step, -1 where it has none.
        peer: other rank of a send or receive, -1 otherwise.
        dependencies: indices of earlier actions of the schedule, of any rank.
        resources: queues it occupies; () overlaps with everything (a pure delay).
        memory: what it does to the ledger.
        rendezvous: number shared by the actions of one collective, -1 for none.
        pressure: share of its time that is bound by memory bandwidth, 0..1; what it suffers when
            other ranks of its host run at the same time (measured contention).
    """

    op: str
    rank: int
    work: Work
    stage: int = -1
    microbatch: int = -1
    step: int = -1
    peer: int = -1
    dependencies: tuple[int, ...] = ()
    resources: tuple[str, ...] = (COMPUTE,)
    memory: Memory | None = None
    rendezvous: int = -1
    pressure: float = 0.0

    @property
    def label(self) -> str:
        """Short name in drawings, as PyTorch writes schedules: ``<stage><op><batch>``."""
        text = f"{self.stage if self.stage >= 0 else ''}{self.op}"
        if self.microbatch >= 0:
            text += str(self.microbatch)
        return text if self.step < 0 else f"{text}.{self.step}"


@dataclass(frozen=True, eq=False)
class Schedule:
    """An immutable schedule; make one with `ScheduleBuilder`.

    Attributes:
        devices: device name of each rank.
        works: the distinct works; ``work`` indexes them.
        resources: the distinct resource names; ``resource_sets`` lists sets of their indices.
        rank, op, work, stage, microbatch, step, peer, rendezvous, resource_set: one int per action.
        pressure: one float per action.
        dependency_start, dependency: dependencies in compressed rows.
        memory_item: index into ``items`` or -1; allocate_bytes, free_bytes: one int per action.
    """

    devices: tuple[str, ...]
    works: tuple[Work, ...]
    ops: tuple[str, ...]
    items: tuple[str, ...]
    resources: tuple[str, ...]
    resource_sets: tuple[tuple[int, ...], ...]
    rank: IntArray
    op: IntArray
    work: IntArray
    stage: IntArray
    microbatch: IntArray
    step: IntArray
    peer: IntArray
    rendezvous: IntArray
    resource_set: IntArray
    pressure: FloatArray
    dependency_start: IntArray
    dependency: IntArray
    memory_item: IntArray
    allocate_bytes: IntArray
    free_bytes: IntArray
    notes: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.devices)

    def __getitem__(self, index: int) -> Action:
        i = range(len(self))[index]
        item = int(self.memory_item[i])
        memory = None
        if item >= 0:
            memory = Memory(self.items[item], int(self.allocate_bytes[i]), int(self.free_bytes[i]))
        first, last = int(self.dependency_start[i]), int(self.dependency_start[i + 1])
        return Action(
            op=self.ops[self.op[i]],
            rank=int(self.rank[i]),
            work=self.works[self.work[i]],
            stage=int(self.stage[i]),
            microbatch=int(self.microbatch[i]),
            step=int(self.step[i]),
            peer=int(self.peer[i]),
            dependencies=tuple(int(d) for d in self.dependency[first:last]),
            resources=tuple(self.resources[r] for r in self.resource_sets[self.resource_set[i]]),
            memory=memory,
            rendezvous=int(self.rendezvous[i]),
            pressure=float(self.pressure[i]),
        )

    def __iter__(self) -> Iterator[Action]:
        return (self[i] for i in range(len(self)))

    def of_rank(self, rank: int) -> list[int]:
        """Indices of the actions of one rank, in its order."""
        return [int(i) for i in np.flatnonzero(self.rank == rank)]
