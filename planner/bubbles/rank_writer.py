"""`RankWriter`: adds the rows of one rank to a schedule, with works and what they wait for."""

from __future__ import annotations

from foreplan.cost_models.costs import HostLaunch, Work
from foreplan.cost_models.schedule import COMPUTE, Memory
from foreplan.cost_models.schedule_builder import ScheduleBuilder
from foreplan.planner.bubbles.actions import ACTIVATION, ENCODE, ENCODE_BACKWARD, GRADIENT
from foreplan.planner.bubbles.step_rows import Row, StepRows
from foreplan.planner.bubbles.task_graph import Task, TaskGraph

TENSOR, DP = "tensor", "dp"

_FREE = HostLaunch(0)


class RankWriter:
    """See the module; the rows of ranks follow each other.

    Args:
        graph: what is computed where.
        rows: of all ranks.
        builder: to add to.
        rank: whose rows.
        meetings: numbers of collectives; the writers of all ranks share them.
    """

    def __init__(
        self, graph: TaskGraph, rows: StepRows, builder: ScheduleBuilder, rank: int,
        meetings: dict[tuple[str, int, int], int],
    ) -> None:  # fmt: skip
        self._of, self._rows, self._builder, self._rank = graph, rows, builder, rank
        self._step, self._decision, self._meetings = graph.step, graph.decision, meetings
        self._beside_sums = rows.beside_sums(rank)
        self._started: set[Task] = set()
        # What the first use of a unit (-1: of the backbone) waits for.
        self._gathered: dict[tuple[int, int], int] = {}
        self._chain: dict[Task, int] = {}
        self._previous: Task | None = None  # last pass of the backbone
        # Last row of each (encoder, unit); (-1, -1) for the backbone.
        self._done: dict[tuple[int, int], int] = {}

    def write(self) -> None:
        """Add every row."""
        reduced: list[int] = []
        for row in self._rows.ranks[self._rank]:
            if row.kind in ("send", "recv"):
                self._transfer(row)
            elif row.kind in ("all_gather", "reduce_scatter", "all_reduce"):
                reduced.append(self._collective(row))
            elif row.kind == "beside":
                self._beside(row)
            elif row.kind == "optimizer":
                work = self._step.steps.optimizer(*self._share())
                self._builder.add(
                    "optimizer", self._rank, work, dependencies=reduced,
                    pressure=self._step.pressure(self._rank, work),
                )  # fmt: skip
            else:
                self._compute(row)

    # Passes and units -------------------------------------------------------------------------

    def _compute(self, row: Row) -> None:
        task = row.task
        needs = self._opening(task) if task not in self._started else [self._chain[task]]
        self._started.add(task)
        work, op = self._work(row)
        for sums, others in self._beside_sums.get(row, ()):
            every = [self._work(other)[0] for other in others]
            work = self._step.slowed(self._rank, work, self._work(sums)[0], every)
        link = row.kind == "tensor"
        if row.kind == "unit" and (task.encoder, row.place) in self._gathered:
            needs = [*needs, self._gathered.pop((task.encoder, row.place))]
        made = self._builder.add(
            "tensor" if link else op, self._rank, work, stage=self._of.number(task),
            microbatch=task.microbatch, step=row.place, dependencies=needs,
            resources=(TENSOR,) if link else (COMPUTE,),
            pressure=0.0 if link else self._step.pressure(self._rank, work),
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
                needs.append(self._rows.last[source])
            else:
                needs.append(self._rows.index[self._rank, Row("recv", source, other=task)])
        own = of.own_forward(task)
        if own is not None:
            needs.append(self._rows.last[own])
        # A split pass does not queue on ``compute`` as a whole, so that the backbone's passes keep
        # their order by name.
        before = self._previous if task.encoder < 0 else None
        if before is not None and (task in of.split or before in of.split):
            needs.append(self._rows.last[before])
        if task.encoder < 0 and (-1, -1) in self._gathered:
            needs.append(self._gathered.pop((-1, -1)))
        return list(dict.fromkeys(needs))

    def _work(self, row: Row) -> tuple[Work, str]:
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
            return step.unit_collective(e, plan, task.stage, task.op, row.place), task.op
        work = step.unit(
            e, plan.tp, plan.units[row.place], plan.units[row.place + 1], task.op,
            bare=task in self._of.split,
        )  # fmt: skip
        return work, ENCODE if task.op == "F" else ENCODE_BACKWARD

    def _memory(self, row: Row) -> Memory | None:
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

    def _unit_memory(self, row: Row) -> Memory | None:
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

    def _transfer(self, row: Row) -> None:
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
            needs, peer, memory = [self._rows.last[source]], b, None
        else:
            work, peer = _FREE, a
            needs = [self._rows.index[a, Row("send", source, other=target)]]
            features = target == Task("F", 0, target.microbatch)
            memory = Memory("activations", allocate_bytes=size) if features else None
        self._builder.add(
            row.kind, self._rank, work, stage=of.number(target), microbatch=target.microbatch,
            step=code, peer=peer, dependencies=needs, resources=(), memory=memory,
        )  # fmt: skip

    def _collective(self, row: Row) -> int:
        of, e, k = self._of, row.task.encoder, row.task.stage
        meeting = (row.kind, -1, self._rank) if e < 0 else (row.kind, e, row.place)
        number = self._meetings.setdefault(meeting, len(self._meetings))
        done = self._done.get((e, row.place))
        needs = [] if done is None or row.kind == "all_gather" else [done]
        made = self._builder.add(
            row.kind, self._rank, of.exchange(row.kind, self._rank, e, k, row.place),
            stage=self._exchanged(row), step=row.place, dependencies=needs, resources=(DP,),
            rendezvous=number,
        )  # fmt: skip
        if row.kind == "all_gather":
            self._gathered[e, row.place] = made
        return made

    def _beside(self, row: Row) -> None:
        """What a collective takes from the computation that it runs beside."""
        task = row.task
        work = self._of.exchange(task.op, self._rank, task.encoder, task.stage, row.place)
        taken = self._step.beside(work)
        assert taken is not None
        # The backbone's bears no stage, so that nobody takes it for a pass.
        stage = -1 if task.encoder < 0 else self._exchanged(row)
        self._builder.add("beside", self._rank, taken, stage=stage, step=row.place)

    def _exchanged(self, row: Row) -> int:
        """``Action.stage`` of a collective."""
        e, k = row.task.encoder, row.task.stage
        return self._of.first_stage(self._rank) or 0 if e < 0 else self._decision.stage_number(e, k)

    def _share(self) -> tuple[int, int]:
        """Parameters whose optimizer step the rank makes, and the flat tensors they lie in."""
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
        tensors = 0 if self._of.first_stage(self._rank) is None else 1
        for e, k in self._of.hosted(self._rank):
            if self._of.trained[e]:
                tensors += len(self._of.buckets(e, k))
                plan = self._decision.encoders[e]
                own = step.encoders[e].range_parameters(*plan.stages[k]) // plan.tp
                sharded = step.workload.sharded_optimizer
                total += own // (len(self._of.replicas(e, k)) if sharded else 1)
        return total, max(1, tensors)
