"""A bubble decision as a `Schedule`: the orders of its ranks with all communication put in.

Orders say what is computed (`actions.py`); what is sent follows from where that happens. A *task*
is a pass of a virtual stage or a run of an encoder stage for one micro-batch; it consists of one or
several rows of one rank. Its first row waits for the tasks it needs, its last row releases the
others.

Resources of a rank: ``compute``; ``tensor``, the link of its tensor parallel group, which
collectives occupy in list order; ``dp``, the network of its replicas. Transfers occupy nothing: a
lag, as in ``cost_models.pipeline``.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from foreplan.cost_models.costs import HostLaunch, Work
from foreplan.cost_models.schedule import COMPUTE, Memory, Schedule, ScheduleBuilder
from foreplan.errors import SpecError
from foreplan.planner.bubbles.actions import (
    ACTIVATION,
    ENCODE,
    ENCODE_BACKWARD,
    GRADIENT,
    Step,
    parse_order,
)
from foreplan.planner.bubbles.decision import BubblesDecision
from foreplan.planner.bubbles.placement import BUCKETS
from foreplan.planner.bubbles.training_step import TrainingStep

TENSOR, DP = "tensor", "dp"


_FREE = HostLaunch(0)


class Task(NamedTuple):
    """A pass (``encoder`` -1) or an encoder stage's run of one micro-batch."""

    op: str
    stage: int
    microbatch: int
    encoder: int = -1


class _Row(NamedTuple):
    """One action to be.

    Attributes:
        kind: ``pass``, ``piece``, ``unit``, ``tensor``, ``send``, ``recv``, or a collective's name.
        task: what it belongs to; of a transfer, the sender's.
        place: piece or unit; of an encoder's bucket, its first unit.
        other: of a transfer, the receiver's task.
    """

    kind: str
    task: Task
    place: int = -1
    other: Task | None = None


class StepSchedule:
    """Builds the schedule of one decision.

    Args:
        step: works and bytes under the decision's layout.
        decision: what to schedule.

    Raises:
        SpecError: an order that computes something twice, not at all, on another rank than the
            decision places it, or in pieces that do not follow each other.
    """

    def __init__(self, step: TrainingStep, decision: BubblesDecision) -> None:
        self._step = step
        self._decision = decision
        self._orders = [
            parse_order(text, f"orders[{rank}]") for rank, text in enumerate(decision.orders)
        ]
        self._unit_stage = [
            [plan.stage_of(u) for u in range(len(plan.units) - 1)] for plan in decision.encoders
        ]
        self._gradient = "I" if any(x.op == "I" for x in self._orders[0]) else "B"
        self._trained = [not step.encoder(e).frozen for e in range(len(decision.encoders))]
        self._split: set[Task] = set()
        self._items: list[list[tuple[Step, Task]]] = []
        for rank, order in enumerate(self._orders):
            mine = [(item, self._task(item, rank)) for item in order]
            self._items.append(mine)
            self._split |= {task for item, task in mine if item.piece >= 0 or item.op in "fb"}
        self._check()

    def build(self) -> Schedule:
        """All ranks' rows with their dependencies."""
        rows = [list(self._rank_rows(rank)) for rank in range(len(self._orders))]
        index: dict[tuple[int, _Row], int] = {}
        self._last: dict[Task, int] = {}
        for rank, mine in enumerate(rows):
            for row in mine:
                index[rank, row] = len(index)
                if row.kind in ("pass", "piece", "unit", "tensor"):
                    self._last[row.task] = index[rank, row]
        self._index = index
        self._meetings: dict[tuple[str, int, int], int] = {}
        builder = ScheduleBuilder(self._step.devices)
        for rank, mine in enumerate(rows):
            _RankWriter(self, builder, rank).write(mine)
        return builder.build()

    # ------------------------------------------------------------------------------- tasks

    def _task(self, item: Step, rank: int) -> Task:
        if item.encoder < 0:
            return Task(item.op, item.stage, item.microbatch)
        plans = self._decision.encoders
        if item.encoder >= len(plans) or item.microbatch >= self._decision.microbatches:
            raise _misplaced(item, rank, "an encoder and a micro-batch of the decision")
        units = self._unit_stage[item.encoder]
        if item.op in "FB":
            if not 0 <= item.unit < len(units):
                raise _misplaced(item, rank, f"units below {len(units)}")
            stage = units[item.unit]
        else:  # a collective behind a stage bears the number of the next unit
            row = plans[item.encoder].ranks[plans[item.encoder].slots[item.microbatch]]
            near = [u for u in (item.unit, item.unit - 1, item.unit + 1) if 0 <= u < len(units)]
            stage = next((units[u] for u in near if row[units[u]] == rank), units[near[0]])
        return Task(item.op.upper(), stage, item.microbatch, item.encoder)

    def rank_of(self, task: Task) -> int:
        """Rank that a task runs on."""
        if task.encoder < 0:
            return self._decision.stages[task.stage].rank
        plan = self._decision.encoders[task.encoder]
        return plan.ranks[plan.slots[task.microbatch]][task.stage]

    def number(self, task: Task) -> int:
        """``Action.stage`` of a task."""
        if task.encoder < 0:
            return task.stage
        return self._decision.stage_number(task.encoder, task.stage)

    def sources(self, task: Task) -> list[Task]:
        """Tasks whose output a task takes, other than its own forward pass."""
        op, stage, mb, e = task
        if e < 0:
            if op == "F" and stage == 0:
                plans = self._decision.encoders
                return [Task("F", len(p.stages) - 1, mb, k) for k, p in enumerate(plans)]
            if op == "F":
                return [Task("F", stage - 1, mb)]
            last = stage == len(self._decision.stages) - 1
            return [Task(op, stage + 1, mb)] if op == self._gradient and not last else []
        if op == "F":
            return [Task("F", stage - 1, mb, e)] if stage else []
        if stage == len(self._decision.encoders[e].stages) - 1:
            return [Task(self._gradient, 0, mb)]
        return [Task("B", stage + 1, mb, e)]

    def targets(self, task: Task) -> list[Task]:
        """Tasks that take a task's output."""
        op, stage, mb, e = task
        if e >= 0:
            last = stage == len(self._decision.encoders[e].stages) - 1
            if op == "F":
                return [Task("F", 0, mb)] if last else [Task("F", stage + 1, mb, e)]
            return [Task("B", stage - 1, mb, e)] if stage else []
        if op == "F":
            return [Task("F", stage + 1, mb)] if stage + 1 < len(self._decision.stages) else []
        if op != self._gradient:
            return []
        if stage:
            return [Task(op, stage - 1, mb)]
        plans = enumerate(self._decision.encoders)
        return [Task("B", len(p.stages) - 1, mb, k) for k, p in plans if self._trained[k]]

    def own_forward(self, task: Task) -> Task | None:
        """The task that must have run on the same rank before."""
        if task.op == "F":
            return None
        return task._replace(op="I" if task.op == "W" else "F")

    # ------------------------------------------------------------------------------- rows

    def _rank_rows(self, rank: int) -> Iterator[_Row]:
        """Rows of one rank in order, receives before and sends after what they belong to."""
        yield from self._gathers(rank)
        left = Counter(task for _, task in self._items[rank])
        opened: set[Task] = set()
        for item, task in self._items[rank]:
            if task not in opened:
                opened.add(task)
                for source in self.sources(task):
                    if self.rank_of(source) != rank:
                        yield _Row("recv", source, other=task)
            if item.encoder >= 0:
                yield _Row("tensor" if item.op in "fb" else "unit", task, item.unit)
            elif item.piece < 0:
                yield _Row("pass", task)
            else:
                yield _Row("tensor", task, item.piece)
                if left[task] > 1:
                    yield _Row("piece", task, item.piece)
            left[task] -= 1
            if not left[task]:
                for target in self.targets(task):
                    if self.rank_of(target) != rank:
                        yield _Row("send", task, other=target)
        yield from self._reductions(rank)
        yield _Row("optimizer", Task("", -1, rank))

    def _gathers(self, rank: int) -> Iterator[_Row]:
        """Sharded parameters: the encoders', which are needed first, then the backbone's."""
        if self._step.workload.sharded_optimizer:
            yield from self._shared(rank, "all_gather")
            if self._step.plan.dp > 1 and self.first_stage(rank) is not None:
                yield _Row("all_gather", Task("", -1, rank))

    def _reductions(self, rank: int) -> Iterator[_Row]:
        """Gradients: the backbone's, which are ready first, then the encoders'."""
        kind = "reduce_scatter" if self._step.workload.sharded_optimizer else "all_reduce"
        if self._step.plan.dp > 1 and self.first_stage(rank) is not None:
            yield _Row(kind, Task("", -1, rank))
        yield from self._shared(rank, kind)

    def _shared(self, rank: int, kind: str) -> Iterator[_Row]:
        for e, k in self.hosted(rank):
            if len(self.replicas(e, k)) > 1 and self._trained[e]:
                buckets = self.buckets(e, k)
                for first, _ in buckets if kind == "all_gather" else buckets[::-1]:
                    yield _Row(kind, Task("", k, rank, e), first)

    def hosted(self, rank: int) -> list[tuple[int, int]]:
        """(encoder, stage) on a rank."""
        return [
            (e, k)
            for e, plan in enumerate(self._decision.encoders)
            for k in range(len(plan.stages))
            if any(row[k] == rank for row in plan.ranks)
        ]

    def buckets(self, encoder: int, stage: int) -> list[tuple[int, int]]:
        """First unit of each bucket of an encoder stage and one past its last."""
        span = self._decision.encoders[encoder].stage_units(stage)
        count = min(BUCKETS, len(span)) if self._step.workload.sharded_optimizer else 1
        cuts = [span.start + len(span) * b // count for b in range(count + 1)]
        return list(itertools.pairwise(cuts))

    def replicas(self, encoder: int, stage: int) -> tuple[int, ...]:
        """Cluster ranks that hold the same parameters of an encoder stage."""
        ranks = dict.fromkeys(row[stage] for row in self._decision.encoders[encoder].ranks)
        return self._step.replica_group(tuple(ranks))

    def first_stage(self, rank: int) -> int | None:
        """First virtual stage on a rank."""
        return next((s for s, x in enumerate(self._decision.stages) if x.rank == rank), None)

    # ------------------------------------------------------------------------------- checks

    def _check(self) -> None:
        """Every task once, whole, and where the decision places it."""
        found: dict[Task, list[Step]] = {}
        for rank, mine in enumerate(self._items):
            for item, task in mine:
                stages = len(self._decision.stages)
                if task.encoder < 0 and not 0 <= task.stage < stages:
                    raise _misplaced(item, rank, f"virtual stages below {stages}")
                if task.microbatch >= self._decision.microbatches:
                    raise _misplaced(item, rank, "a micro-batch of the decision")
                if self.rank_of(task) != rank:
                    raise _misplaced(item, rank, f"it on rank {self.rank_of(task)}")
                found.setdefault(task, []).append(item)
        for task in self._expected():
            items = found.pop(task, None)
            if items is None:
                raise SpecError("orders", got=f"no {_name(task)}", expected="every pass once")
            self._check_whole(task, items)
        if found:
            raise SpecError("orders", got=_name(next(iter(found))), expected="no such pass")

    def _check_whole(self, task: Task, items: list[Step]) -> None:
        bare = [item for item in items if item.op.isupper()]
        got = [item.unit if task.encoder >= 0 else item.piece for item in bare]
        if task.encoder >= 0:
            wanted = list(self._decision.encoders[task.encoder].stage_units(task.stage))
            if task.op == "B":
                wanted.reverse()
            links = [item.unit for item in items if item.op.islower()]
            turn = 1 if task.op == "F" else -1
            if links and links != [*wanted, wanted[-1] + turn]:
                raise SpecError(
                    "orders", got=f"collectives {links} of {_name(task)}",
                    expected="one in front of each unit and one behind the last",
                )  # fmt: skip
        elif task in self._split:
            stage = self._decision.stages[task.stage]
            wanted = list(range(self._step.pieces(stage.start, stage.end) + 1))
        else:
            wanted = [-1]
        if got != wanted:
            raise SpecError("orders", got=f"{got} of {_name(task)}", expected=f"{wanted} in order")

    def _expected(self) -> Iterator[Task]:
        ops = ("F", "B") if self._gradient == "B" else ("F", "I", "W")
        for mb in range(self._decision.microbatches):
            for op in ops:
                for s in range(len(self._decision.stages)):
                    yield Task(op, s, mb)
            for e, plan in enumerate(self._decision.encoders):
                for op in ("F", "B") if self._trained[e] else ("F",):
                    for k in range(len(plan.stages)):
                        yield Task(op, k, mb, e)


class _RankWriter:
    """Adds the rows of one rank to a builder; the rows of ranks follow each other."""

    def __init__(self, of: StepSchedule, builder: ScheduleBuilder, rank: int) -> None:
        self._of, self._builder, self._rank = of, builder, rank
        self._step, self._decision = of._step, of._decision
        self._started: set[Task] = set()
        # What the first use of a unit (-1: of the backbone) waits for.
        self._gathered: dict[tuple[int, int], int] = {}
        self._chain: dict[Task, int] = {}
        self._previous: Task | None = None  # last pass of the backbone
        # Last row of each (encoder, unit); (-1, -1) for the backbone.
        self._done: dict[tuple[int, int], int] = {}

    def write(self, rows: list[_Row]) -> None:
        """Add every row."""
        reduced: list[int] = []
        for row in rows:
            if row.kind in ("send", "recv"):
                self._transfer(row)
            elif row.kind in ("all_gather", "reduce_scatter", "all_reduce"):
                reduced.append(self._collective(row))
            elif row.kind == "optimizer":
                self._builder.add(
                    "optimizer", self._rank, self._step.steps.optimizer(self._share()),
                    dependencies=reduced,
                )  # fmt: skip
            else:
                self._compute(row)

    # Passes and units -------------------------------------------------------------------------

    def _compute(self, row: _Row) -> None:
        task = row.task
        needs = self._opening(task) if task not in self._started else [self._chain[task]]
        self._started.add(task)
        work, op = self._work(row)
        link = row.kind == "tensor"
        if row.kind == "unit" and (task.encoder, row.place) in self._gathered:
            needs = [*needs, self._gathered.pop((task.encoder, row.place))]
        made = self._builder.add(
            "tensor" if link else op, self._rank, work, stage=self._of.number(task),
            microbatch=task.microbatch, step=row.place, dependencies=needs,
            resources=(TENSOR,) if link else (COMPUTE,),
            memory=None if link else self._memory(row),
        )  # fmt: skip
        self._chain[task] = made
        if not link or task.encoder < 0:
            self._done[task.encoder, row.place if task.encoder >= 0 else -1] = made
        if task.encoder < 0:
            self._previous = task

    def _opening(self, task: Task) -> list[int]:
        """What the first row of a task waits for."""
        of = self._of
        needs: list[int] = []
        for source in of.sources(task):
            if of.rank_of(source) == self._rank:
                needs.append(of._last[source])
            else:
                needs.append(of._index[self._rank, _Row("recv", source, other=task)])
        own = of.own_forward(task)
        if own is not None:
            needs.append(of._last[own])
        # A split pass does not queue on ``compute`` as a whole, so that the backbone's passes keep
        # their order by name.
        before = self._previous if task.encoder < 0 else None
        if before is not None and (task in of._split or before in of._split):
            needs.append(of._last[before])
        if task.encoder < 0 and (-1, -1) in self._gathered:
            needs.append(self._gathered.pop((-1, -1)))
        return list(dict.fromkeys(needs))

    def _work(self, row: _Row) -> tuple[Work, str]:
        task, step = row.task, self._step
        if task.encoder < 0:
            stage = self._decision.stages[task.stage]
            where = stage.start, stage.end, task.op
            if row.kind == "tensor":
                return step.collective(*where, row.place), task.op
            if row.kind == "piece":
                return step.piece(*where, row.place), task.op
            return step.passes(*where), task.op
        e, plan = task.encoder, self._decision.encoders[task.encoder]
        if row.kind == "tensor":
            span = plan.stage_units(task.stage)
            edges = (span[0], span[-1] + 1) if task.op == "F" else (span[-1], span[0] - 1)
            edge = row.place in edges
            return step.unit_collective(e, plan.tp, task.op, edge=edge), task.op
        work = step.unit(
            e, plan.tp, plan.units[row.place], plan.units[row.place + 1], task.op,
            bare=task in self._of._split,
        )  # fmt: skip
        return work, ENCODE if task.op == "F" else ENCODE_BACKWARD

    def _memory(self, row: _Row) -> Memory | None:
        """Activations live from a forward pass to the backward pass that needs them last."""
        task, step = row.task, self._step
        if task.encoder >= 0:
            return self._unit_memory(row)
        stage = self._decision.stages[task.stage]
        pieces = step.pieces(stage.start, stage.end)
        held = step.activation_bytes(stage.start, stage.end)
        arrived = 0
        if task.stage == 0:  # features are taken when they arrive and count as the stage's input
            arrived = sum(step.feature_bytes(e) for e in range(len(self._decision.encoders)))
        if task.op == "F" and row.place <= 0:
            return Memory("activations", allocate_bytes=max(0, held - arrived))
        if task.op in ("B", "W") and row.place in (-1, pieces - 1):
            return Memory("activations", free_bytes=max(held, arrived))
        return None

    def _unit_memory(self, row: _Row) -> Memory | None:
        task, step = row.task, self._step
        e, plan = task.encoder, self._decision.encoders[task.encoder]
        begin, end = plan.units[row.place], plan.units[row.place + 1]
        held = step.unit_bytes(e, plan.tp, begin, end)
        if task.op == "B":
            return Memory("encoder_activations", free_bytes=held) if held else None
        if end == plan.units[-1] and self._decision.stages[0].rank == self._rank:
            held += step.feature_bytes(e)
        return Memory("encoder_activations", allocate_bytes=held) if held else None

    # Communication ----------------------------------------------------------------------------

    def _transfer(self, row: _Row) -> None:
        source, target = row.task, row.other
        assert target is not None
        of, step = self._of, self._step
        a, b = of.rank_of(source), of.rank_of(target)
        encoder = max(source.encoder, target.encoder, 0)
        code = 2 * encoder + (ACTIVATION if target.op == "F" else GRADIENT)
        into_backbone = -1 in (source.encoder, target.encoder)
        if source.encoder < 0 and target.encoder < 0:
            size = step.hidden_bytes
        elif into_backbone:
            size = step.feature_bytes(encoder)
        else:
            size = step.encoder_hidden_bytes(encoder, self._decision.encoders[encoder].tp)
        if row.kind == "send":
            work = step.steps.transfer(size, step.cluster_rank(a), step.cluster_rank(b))
            needs, peer, memory = [of._last[source]], b, None
        else:
            work, peer = _FREE, a
            needs = [of._index[a, _Row("send", source, other=target)]]
            features = target == Task("F", 0, target.microbatch)
            memory = Memory("activations", allocate_bytes=size) if features else None
        self._builder.add(
            row.kind, self._rank, work, stage=of.number(target), microbatch=target.microbatch,
            step=code, peer=peer, dependencies=needs, resources=(), memory=memory,
        )  # fmt: skip

    def _collective(self, row: _Row) -> int:
        of, step, e, k = self._of, self._step, row.task.encoder, row.task.stage
        if e < 0:
            group, stage = step.replica_group((self._rank,)), of.first_stage(self._rank) or 0
            parameters = self._exposed_parameters()
            meeting = (row.kind, -1, self._rank)
        else:
            plan = self._decision.encoders[e]
            group, stage = of.replicas(e, k), self._decision.stage_number(e, k)
            last = dict(of.buckets(e, k))[row.place]
            halves = plan.units[row.place], plan.units[last]
            parameters = step.encoders[e].half_range_parameters(*halves) // plan.tp
            meeting = (row.kind, e, row.place)
        number = of._meetings.setdefault(meeting, len(of._meetings))
        if row.kind == "all_gather":
            work: Work = step.steps.gather(parameters, group, encoder=e >= 0)
        elif row.kind == "reduce_scatter":
            work = step.steps.scatter(parameters, group, encoder=e >= 0)
        else:
            work = step.steps.reduce(parameters, group)
        done = self._done.get((e, row.place))
        needs = [] if done is None or row.kind == "all_gather" else [done]
        made = self._builder.add(
            row.kind, self._rank, work, stage=stage, step=row.place, dependencies=needs,
            resources=(DP,), rendezvous=number,
        )  # fmt: skip
        if row.kind == "all_gather":
            self._gathered[e, row.place] = made
        return made

    def _exposed_parameters(self) -> int:
        """Parameters of the rank's first virtual stage: what no computation hides.

        Later stages gather while earlier ones compute, and reduce while earlier ones still do.
        """
        stage = self._decision.stages[self._of.first_stage(self._rank) or 0]
        parameters = self._step.backbone.range_parameters(stage.start, stage.end)
        return parameters // self._step.plan.tp

    def _share(self) -> int:
        """Parameters whose optimizer step the rank makes."""
        step = self._step
        replicas = step.plan.dp if step.workload.sharded_optimizer else 1
        total = (
            sum(
                step.backbone.range_parameters(s.start, s.end)
                for s in self._decision.stages
                if s.rank == self._rank
            )
            // step.plan.tp
            // replicas
        )
        for e, k in self._of.hosted(self._rank):
            if self._of._trained[e]:
                plan = self._decision.encoders[e]
                own = step.encoders[e].range_parameters(*plan.stages[k]) // plan.tp
                sharded = step.workload.sharded_optimizer
                total += own // (len(self._of.replicas(e, k)) if sharded else 1)
        return total


def _name(task: Task) -> str:
    where = f"stage {task.stage}" if task.encoder < 0 else f"encoder {task.encoder}.{task.stage}"
    return f"{task.op} of micro-batch {task.microbatch} on {where}"


def _misplaced(item: Step, rank: int, expected: str) -> SpecError:
    return SpecError(f"orders[{rank}]", got=item.word, expected=expected)
