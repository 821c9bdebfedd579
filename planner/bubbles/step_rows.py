"""`StepRows`: the rows of every rank in order, with all communication put in."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from foreplan.planner.bubbles.task_graph import Task, TaskGraph


class Row(NamedTuple):
    """One action to be.

    Attributes:
        kind: ``pass``, ``piece``, ``unit``, ``tensor``, ``send``, ``recv``, a collective's name, or
            ``beside``, what that collective takes from computation.
        task: what it belongs to; of a transfer, the sender's.
        place: piece or unit; of an encoder's bucket, its first unit.
        other: of a transfer, the receiver's task.
    """

    kind: str
    task: Task
    place: int = -1
    other: Task | None = None


class StepRows:
    """See the module.

    Args:
        graph: what is computed where.

    Attributes:
        ranks: rows of each rank.
        index: number of each (rank, row) in the schedule.
        last: number of each task's last row.
    """

    def __init__(self, graph: TaskGraph) -> None:
        self._graph = graph
        self.ranks = [list(self._rank_rows(rank)) for rank in range(len(graph.items))]
        self.index: dict[tuple[int, Row], int] = {}
        self.last: dict[Task, int] = {}
        for rank, mine in enumerate(self.ranks):
            for row in mine:
                self.index[rank, row] = len(self.index)
                if row.kind in ("pass", "piece", "unit", "tensor"):
                    self.last[row.task] = self.index[rank, row]

    def _rank_rows(self, rank: int) -> Iterator[Row]:
        """Rows of one rank in order, receives before and sends after what they belong to."""
        yield from self._gathers(rank)
        taken = self._taken(rank)
        yield from taken.get(-1, ())
        left = Counter(task for _, task in self._graph.items[rank])
        opened: set[Task] = set()
        for place, (item, task) in enumerate(self._graph.items[rank]):
            if task not in opened:
                opened.add(task)
                for source in self._graph.sources(task):
                    if self._graph.rank_of(source) != rank:
                        yield Row("recv", source, other=task)
            if item.encoder >= 0:
                yield Row("tensor" if item.op in "fb" else "unit", task, item.unit)
            elif item.piece < 0:
                yield Row("pass", task)
            else:
                yield Row("tensor", task, item.piece)
                if left[task] > 1:
                    yield Row("piece", task, item.piece)
            left[task] -= 1
            if not left[task]:
                for target in self._graph.targets(task):
                    if self._graph.rank_of(target) != rank:
                        yield Row("send", task, other=target)
            yield from taken.get(place, ())
        yield from self._reductions(rank)
        yield Row("optimizer", Task("", -1, rank))

    def beside_sums(self, rank: int) -> dict[Row, list[tuple[Row, list[Row]]]]:
        """What is computed while lanes sum up.

        A sum begins as soon as the piece or unit before it is done, wherever its row stands.

        Returns:
            By the first row that is computed beside sums: each one's row, with all such rows.
        """
        found: dict[Row, list[tuple[Row, list[Row]]]] = defaultdict(list)
        since: dict[Task, list[Row]] = {}  # computed since the last row of a task
        for row in self.ranks[rank]:
            if row.kind not in ("pass", "piece", "unit", "tensor"):
                continue
            others = since.pop(row.task, [])
            if row.kind == "tensor":
                if others:
                    found[others[0]].append((row, others))
                continue
            for computed in since.values():
                computed.append(row)
            if row.task in self._graph.split and self.index[rank, row] != self.last[row.task]:
                since[row.task] = []
        return found

    def _taken(self, rank: int) -> dict[int, list[Row]]:
        """What collectives take from computation, by the place of the order that they come behind.

        A gather is started before everything, a reduction behind the last pass that it waits for.
        """
        last: dict[tuple[int, int], int] = {}
        for place, (item, task) in enumerate(self._graph.items[rank]):
            if item.encoder < 0 or item.op == "B":
                last[task.encoder, item.unit if item.encoder >= 0 else -1] = place
        found: dict[int, list[Row]] = defaultdict(list)
        for row in (*self._gathers(rank), *self._reductions(rank)):
            e, k = row.task.encoder, row.task.stage
            work = self._graph.exchange(row.kind, rank, e, k, row.place)
            if self._graph.step.beside(work) is not None:
                place = -1 if row.kind == "all_gather" else last.get((e, row.place), -1)
                found[place].append(Row("beside", row.task._replace(op=row.kind), row.place))
        return found

    def _gathers(self, rank: int) -> Iterator[Row]:
        """Sharded parameters: the encoders', which are needed first, then the backbone's."""
        if self._graph.step.workload.sharded_optimizer:
            yield from self._shared(rank, "all_gather")
            if self._graph.step.plan.dp > 1 and self._graph.first_stage(rank) is not None:
                yield Row("all_gather", Task("", -1, rank))

    def _reductions(self, rank: int) -> Iterator[Row]:
        """Gradients: the backbone's, which are ready first, then the encoders'."""
        kind = "reduce_scatter" if self._graph.step.workload.sharded_optimizer else "all_reduce"
        if self._graph.step.plan.dp > 1 and self._graph.first_stage(rank) is not None:
            yield Row(kind, Task("", -1, rank))
        yield from self._shared(rank, kind)

    def _shared(self, rank: int, kind: str) -> Iterator[Row]:
        for e, k in self._graph.hosted(rank):
            if len(self._graph.replicas(e, k)) > 1 and self._graph.trained[e]:
                buckets = self._graph.buckets(e, k)
                for first, _ in buckets if kind == "all_gather" else buckets[::-1]:
                    yield Row(kind, Task("", k, rank, e), first)
