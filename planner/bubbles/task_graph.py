"""`TaskGraph`: what the orders of a decision compute, where, and what takes whose output.

Orders say what is computed (`actions.py`); what is sent follows from where that happens. A *task*
is a pass of a virtual stage or a run of an encoder stage for one micro-batch; it consists of one or
several rows of one rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from foreplan.cost_models.costs import Work
from foreplan.errors import SpecError
from foreplan.planner.bubbles.actions import Step, parse_order
from foreplan.planner.bubbles.decision import BubblesDecision
from foreplan.planner.bubbles.training_step import TrainingStep


class Task(NamedTuple):
    """A pass (``encoder`` -1) or an encoder stage's run of one micro-batch."""

    op: str
    stage: int
    microbatch: int
    encoder: int = -1

    def __str__(self) -> str:
        where = (
            f"stage {self.stage}" if self.encoder < 0 else f"encoder {self.encoder}.{self.stage}"
        )
        return f"{self.op} of micro-batch {self.microbatch} on {where}"


class TaskGraph:
    """See the module.

    Args:
        step: works and bytes under the decision's layout.
        decision: what to schedule.

    Attributes:
        step, decision: as given.
        items: of each rank, every entry of its order with the task it belongs to.
        trained: whether each encoder has a backward pass.
        split: tasks whose collectives are actions of their own.

    Raises:
        SpecError: an order that computes something twice, not at all, on another rank than the
            decision places it, or in pieces that do not follow each other.
    """

    def __init__(self, step: TrainingStep, decision: BubblesDecision) -> None:
        self.step = step
        self.decision = decision
        self._orders = [
            parse_order(text, f"orders[{rank}]") for rank, text in enumerate(decision.orders)
        ]
        self._unit_stage = [
            [plan.stage_of(u) for u in range(len(plan.units) - 1)] for plan in decision.encoders
        ]
        split = any(x.op == "I" for order in self._orders for x in order)
        self._gradient = "I" if split else "B"
        self.trained = [not step.encoder(e).frozen for e in range(len(decision.encoders))]
        self.split: set[Task] = set()
        self.items: list[list[tuple[Step, Task]]] = []
        for rank, order in enumerate(self._orders):
            mine = [(item, self._task(item, rank)) for item in order]
            self.items.append(mine)
            self.split |= {task for item, task in mine if item.piece >= 0 or item.op in "fb"}
        self._check()

    def _task(self, item: Step, rank: int) -> Task:
        if item.encoder < 0:
            return Task(item.op, item.stage, item.microbatch)
        plans = self.decision.encoders
        if item.encoder >= len(plans) or item.microbatch >= self.decision.microbatches:
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
            return self.decision.stages[task.stage].rank
        plan = self.decision.encoders[task.encoder]
        return plan.ranks[plan.slots[task.microbatch]][task.stage]

    def number(self, task: Task) -> int:
        """``Action.stage`` of a task."""
        if task.encoder < 0:
            return task.stage
        return self.decision.stage_number(task.encoder, task.stage)

    def sources(self, task: Task) -> list[Task]:
        """Tasks whose output a task takes, other than its own forward pass."""
        op, stage, mb, e = task
        if e < 0:
            if op == "F" and stage == 0:
                plans = self.decision.encoders
                return [Task("F", len(p.stages) - 1, mb, k) for k, p in enumerate(plans)]
            if op == "F":
                return [Task("F", stage - 1, mb)]
            last = stage == len(self.decision.stages) - 1
            return [Task(op, stage + 1, mb)] if op == self._gradient and not last else []
        if op == "F":
            return [Task("F", stage - 1, mb, e)] if stage else []
        if stage == len(self.decision.encoders[e].stages) - 1:
            return [Task(self._gradient, 0, mb)]
        return [Task("B", stage + 1, mb, e)]

    def targets(self, task: Task) -> list[Task]:
        """Tasks that take a task's output."""
        op, stage, mb, e = task
        if e >= 0:
            last = stage == len(self.decision.encoders[e].stages) - 1
            if op == "F":
                return [Task("F", 0, mb)] if last else [Task("F", stage + 1, mb, e)]
            return [Task("B", stage - 1, mb, e)] if stage else []
        if op == "F":
            return [Task("F", stage + 1, mb)] if stage + 1 < len(self.decision.stages) else []
        if op != self._gradient:
            return []
        if stage:
            return [Task(op, stage - 1, mb)]
        plans = enumerate(self.decision.encoders)
        return [Task("B", len(p.stages) - 1, mb, k) for k, p in plans if self.trained[k]]

    def own_forward(self, task: Task) -> Task | None:
        """The task that must have run on the same rank before."""
        if task.op == "F":
            return None
        return task._replace(op="I" if task.op == "W" else "F")

    def hosted(self, rank: int) -> list[tuple[int, int]]:
        """(encoder, stage) on a rank."""
        return [
            (e, k)
            for e, plan in enumerate(self.decision.encoders)
            for k in range(len(plan.stages))
            if any(row[k] == rank for row in plan.ranks)
        ]

    def buckets(self, encoder: int, stage: int) -> list[tuple[int, int]]:
        """First unit of each bucket of an encoder stage and one past its last."""
        plan, tower = self.decision.encoders[encoder], self.step.encoders[encoder]
        span = plan.stage_units(stage)
        parameters = tower.range_parameters(*plan.stages[stage]) // self.step.plan.tp
        count = self.step.bucket_count(parameters, self.replicas(encoder, stage))
        count = min(count, len(span))
        cuts = [span.start + len(span) * b // count for b in range(count + 1)]
        return list(itertools.pairwise(cuts))

    def replicas(self, encoder: int, stage: int) -> tuple[int, ...]:
        """Cluster ranks that hold the same parameters of an encoder stage."""
        ranks = dict.fromkeys(row[stage] for row in self.decision.encoders[encoder].ranks)
        return self.step.replica_group(tuple(ranks))

    def exchange(self, kind: str, rank: int, encoder: int, stage: int, first: int) -> Work:
        """What a collective of a rank's replicas costs.

        Args:
            kind: ``all_gather``, ``reduce_scatter`` or ``all_reduce``.
            rank: one of its members.
            encoder: whose parameters or gradients; -1 for the backbone's.
            stage: of the encoder.
            first: first unit of the encoder's bucket.
        """
        step = self.step
        if encoder < 0:
            # What no computation hides: later stages gather while earlier ones compute, and reduce
            # while earlier ones still do.
            own = self.decision.stages[self.first_stage(rank) or 0]
            group = step.replica_group((rank,))
            parameters = step.backbone.range_parameters(own.start, own.end) // step.plan.tp
        else:
            units, last = self.decision.encoders[encoder].units, dict(self.buckets(encoder, stage))
            group, tower = self.replicas(encoder, stage), step.encoders[encoder]
            parameters = tower.half_range_parameters(units[first], units[last[first]])
            parameters //= step.plan.tp
        if kind == "all_gather":
            return step.steps.gather(parameters, group, encoder=encoder >= 0)
        if kind == "reduce_scatter":
            return step.steps.scatter(parameters, group, encoder=encoder >= 0)
        return step.steps.reduce(parameters, group)

    def first_stage(self, rank: int) -> int | None:
        """First virtual stage on a rank."""
        return next((s for s, x in enumerate(self.decision.stages) if x.rank == rank), None)

    # ------------------------------------------------------------------------------- checks

    def _check(self) -> None:
        """Every task once, whole, and where the decision places it."""
        found: dict[Task, list[Step]] = {}
        for rank, mine in enumerate(self.items):
            for item, task in mine:
                stages = len(self.decision.stages)
                if task.encoder < 0 and not 0 <= task.stage < stages:
                    raise _misplaced(item, rank, f"virtual stages below {stages}")
                if task.microbatch >= self.decision.microbatches:
                    raise _misplaced(item, rank, "a micro-batch of the decision")
                if self.rank_of(task) != rank:
                    raise _misplaced(item, rank, f"it on rank {self.rank_of(task)}")
                found.setdefault(task, []).append(item)
        for task in self._expected():
            items = found.pop(task, None)
            if items is None:
                raise SpecError("orders", got=f"no {task}", expected="every pass once")
            self._check_whole(task, items)
        if found:
            raise SpecError("orders", got=str(next(iter(found))), expected="no such pass")

    def _check_whole(self, task: Task, items: list[Step]) -> None:
        bare = [item for item in items if item.op.isupper()]
        got = [item.unit if task.encoder >= 0 else item.piece for item in bare]
        if task.encoder >= 0:
            wanted = list(self.decision.encoders[task.encoder].stage_units(task.stage))
            if task.op == "B":
                wanted.reverse()
            links = [item.unit for item in items if item.op.islower()]
            turn = 1 if task.op == "F" else -1
            if links and links != [*wanted, wanted[-1] + turn]:
                raise SpecError(
                    "orders", got=f"collectives {links} of {task}",
                    expected="one in front of each unit and one behind the last",
                )  # fmt: skip
        elif task in self.split:
            stage = self.decision.stages[task.stage]
            wanted = list(range(self.step.pieces(stage.start, stage.end) + 1))
        else:
            wanted = [-1]
        if got != wanted:
            raise SpecError("orders", got=f"{got} of {task}", expected=f"{wanted} in order")

    def _expected(self) -> Iterator[Task]:
        ops = ("F", "B") if self._gradient == "B" else ("F", "I", "W")
        for mb in range(self.decision.microbatches):
            for op in ops:
                for s in range(len(self.decision.stages)):
                    yield Task(op, s, mb)
            for e, plan in enumerate(self.decision.encoders):
                for op in ("F", "B") if self.trained[e] else ("F",):
                    for k in range(len(plan.stages)):
                        yield Task(op, k, mb, e)


def _misplaced(item: Step, rank: int, expected: str) -> SpecError:
    return SpecError(f"orders[{rank}]", got=item.word, expected=expected)
