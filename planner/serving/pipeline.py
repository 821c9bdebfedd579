"""A serving decision as a `Schedule`: prefill streamed through the stages, then decode round-robin.

Steps are numbered by the token they produce: step 0 is prefill, step t > 0 decodes token t. A
stage's list holds all of its prefill micro-batches and then, step by step, its decode
micro-batches. Hidden states travel to the next stage, token ids from the last stage to the first;
both beside the computation.

A stage of several devices has a rank for each, which receives from one of the stage before,
computes its share and sums it with the others'. In the schedule that is simulated a pass is its
computation and then all of its sums, one action each; `ServingSchedule.pieces` gives what a real
run carries out, where every sum stands on its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from foreplan.cost_models.costs import Collective, HostLaunch, Segment, Work
from foreplan.cost_models.schedule import COMPUTE, MOST_ACTIONS, SHARED_PREFIX, Schedule
from foreplan.cost_models.schedule_builder import ScheduleBuilder
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.program import Program, Variant
from foreplan.errors import SpecError
from foreplan.planner.contention import memory_share
from foreplan.planner.serving.pricing import DECODE, PREFILL, MicroBatches, Pricing, StageKernels
from foreplan.planner.serving.spec import ServingDecision, StageDecision

TOKEN_BYTES = 8  # token ids are int64
#: Queue of a rank for the collectives of its stage.
TENSOR = "tensor"
#: Most tokens that a schedule decodes one after another.
MOST_STEPS = 1 << 17
#: Steps of decoding before all are alike: the first waits for micro-batches of prefill.
_UNLIKE = 2


def stage_kernels(stage: StageDecision) -> StageKernels:
    """The decision's kernel table, parsed.

    Raises:
        SpecError: a variant that is not ``storage/compute/kernel``.
    """
    return StageKernels({key: Variant.parse(text) for key, text in stage.kernels.items()})


@dataclass(frozen=True, slots=True)
class _Stage:
    index: int
    decision: StageDecision
    kernels: StageKernels
    pricing: Pricing
    first: bool
    last: bool
    ranks: tuple[int, ...]
    sort: Hashable  # number of the programs of its passes: stages of one sort have the same

    @property
    def layers(self) -> int:
        return self.decision.end - self.decision.start


class ServingSchedule:
    """Builds the schedule of one decision.

    Args:
        pricing: knows the programs of a stage's pass; its prices are not used.
        cluster: labels of the devices.
        decision: what to schedule.
        closing: the last tokens go back to the first stage too, so that it knows of the end.
    """

    def __init__(
        self, pricing: Pricing, cluster: Cluster, decision: ServingDecision, *,
        closing: bool = False,
    ) -> None:  # fmt: skip
        self._pricing = pricing
        self._closing = closing
        self._in_pieces = False
        self._decision = decision
        self._sizes = MicroBatches(decision.prefill_microbatch, decision.decode_microbatch)
        every = cluster.ranks()
        self._ranks = [every[rank] for rank in decision.ranks]
        self._stages: list[_Stage] = []
        shards = {1: pricing}
        sorts: dict[Hashable, int] = {}
        for i, stage in enumerate(decision.stages):
            begin = sum(s.degree for s in decision.stages[:i])
            if stage.degree not in shards:
                shards[stage.degree] = Pricing(
                    pricing.model, pricing.workload, pricing.costs, stage.degree
                )
            first, last = i == 0, i == len(decision.stages) - 1
            layers = shards[stage.degree].layer_counts(stage.start, stage.bits)
            sort = (first, last, stage.degree, tuple(stage.kernels.items()), layers)
            self._stages.append(
                _Stage(
                    i, stage, stage_kernels(stage), shards[stage.degree], first, last,
                    tuple(range(begin, begin + stage.degree)), sorts.setdefault(sort, len(sorts)),
                )
            )  # fmt: skip
        self._builder = ScheduleBuilder([rank.label for rank in self._ranks])
        # (step, micro-batch of that step's phase) -> actions that put the token ids on stage 0.
        self._tokens: dict[tuple[int, int], Sequence[int]] = {}
        self._works: dict[tuple[str, Hashable, int], Segment] = {}
        self._sums: dict[tuple[str, int], Segment] = {}
        self._pressures: dict[tuple[str, int], float] = {}
        self._messages: dict[tuple[str, int, int], tuple[Collective, tuple[str, ...]]] = {}
        self._before: dict[int, int] = {}  # last sum of a rank, which the next pass waits for
        self._meetings = 0
        self._begin = self._met = 0  # actions and meetings before the last step of decoding

    def build(self) -> Schedule:
        """All prefill micro-batches, then all decode steps.

        Raises:
            SpecError: too many of them.
        """
        workload = self._pricing.workload
        prefills = workload.batch // self._sizes.prefill
        decodes = workload.batch // self._sizes.decode
        passes = (prefills + decodes * (workload.new_tokens - 1)) * len(self._stages)
        # A step of decoding has works of its own, which are more than its actions.
        if passes > MOST_ACTIONS or workload.new_tokens > MOST_STEPS:
            raise SpecError(
                "workload", got=f"{passes} passes in {workload.new_tokens} steps",
                expected=f"at most {MOST_ACTIONS} in {MOST_STEPS}",
                fix="fewer new_tokens, or larger micro-batches",
            )  # fmt: skip
        for microbatch in range(prefills):
            self._pass(PREFILL, 0, microbatch, self._closing or workload.new_tokens > 1)
        steps, last = range(1, workload.new_tokens), workload.new_tokens - 1
        for step in steps[:_UNLIKE]:
            self._decode(step, decodes, last)
        if alike := steps[_UNLIKE:-1]:
            self._decode_alike(alike, decodes)
        if len(steps) > _UNLIKE:
            self._decode(last, decodes, last)
        return self._builder.build()

    def pieces(self) -> Schedule:
        """The same with every sum of a stage of several devices as an action.

        A device's pass is then a row of actions of the phase's name, one up to each sum: the
        embedding's, two of each layer and, with the head, the choice among everybody's best words.
        """
        self._in_pieces = True
        return self.build()

    def _decode(self, step: int, microbatches: int, last: int) -> None:
        """One step of decoding; the first begins at 1."""
        self._begin, self._met = len(self._builder), self._meetings
        for microbatch in range(microbatches):
            self._pass(DECODE, step, microbatch, self._closing or step < last)

    def _decode_alike(self, steps: range, microbatches: int) -> None:
        """Steps that differ from the one before them in their contexts alone."""
        alone = [s for s in self._stages if len(s.ranks) == 1 or not self._in_pieces]
        works = [{s.index: self._work(DECODE, s, step) for s in alone} for step in steps]
        shift = len(steps) * (len(self._builder) - self._begin)
        self._builder.repeat(self._begin, DECODE, works)
        before = steps[0] - 1
        for microbatch in range(microbatches):
            tokens = [action + shift for action in self._tokens[before, microbatch]]
            self._tokens[before + len(steps), microbatch] = tokens
        self._before = {rank: action + shift for rank, action in self._before.items()}
        self._meetings += len(steps) * (self._meetings - self._met)

    def _pass(self, phase: str, step: int, microbatch: int, return_tokens: bool) -> None:
        """One micro-batch through every stage, and its tokens back to the first."""
        last = len(self._stages) - 1
        done: Sequence[int] = ()
        for stage in self._stages:
            if stage.first:
                arrived = [
                    self._needed(phase, step, microbatch, k) for k in range(len(stage.ranks))
                ]
            else:
                before = self._stages[stage.index - 1]
                received = self._hop(phase, step, microbatch, before, stage, done)
                arrived = [(action,) for action in received]
            done = self._compute(phase, stage, step, microbatch, arrived)
        if return_tokens:
            if last:
                done = self._hop(phase, step, microbatch, self._stages[last], self._stages[0], done)
            self._tokens[step, microbatch] = done

    def _compute(
        self, phase: str, stage: _Stage, step: int, microbatch: int,
        arrived: Sequence[tuple[int, ...]],
    ) -> Sequence[int]:  # fmt: skip
        """A stage's pass; returns the last action of each of its ranks."""
        if self._in_pieces and len(stage.ranks) > 1:
            return self._piece_by_piece(phase, stage, step, microbatch, arrived)
        done = [
            self._builder.add(
                phase, rank, self._work(phase, stage, step), stage=stage.index,
                microbatch=microbatch, step=step,
                dependencies=(*needs, *(a for a in (self._before.get(rank),) if a is not None)),
                resources=(COMPUTE,), pressure=self._pressure(phase, stage),
            )
            for rank, needs in zip(stage.ranks, arrived, strict=True)
        ]  # fmt: skip
        if len(stage.ranks) > 1:
            done = self._together(
                "all_reduce", stage, step, microbatch, self._sum(phase, stage), done
            )
            self._before.update(zip(stage.ranks, done, strict=True))
        return done

    def _piece_by_piece(
        self, phase: str, stage: _Stage, step: int, microbatch: int,
        arrived: Sequence[tuple[int, ...]],
    ) -> Sequence[int]:  # fmt: skip
        piece = Segment(phase)
        needs = arrived
        exchanges = self._exchanges(phase, stage)
        for work, count in (*exchanges, (None, 1)):
            for _ in range(count):
                done: Sequence[int] = [
                    self._builder.add(
                        phase, rank, piece, stage=stage.index, microbatch=microbatch, step=step,
                        dependencies=needed, resources=(COMPUTE,),
                    )
                    for rank, needed in zip(stage.ranks, needs, strict=True)
                ]  # fmt: skip
                if work is not None:
                    summed = self._together(work.kind, stage, step, microbatch, work, done)
                    needs = [(action,) for action in summed]
        return done

    def _together(
        self, op: str, stage: _Stage, step: int, microbatch: int, work: Work,
        after: Sequence[int],
    ) -> list[int]:  # fmt: skip
        """A collective of a stage's ranks, each after an action of its own."""
        number, self._meetings = self._meetings, self._meetings + 1
        return [
            self._builder.add(
                op, rank, work, stage=stage.index, microbatch=microbatch, step=step,
                dependencies=(needed,), resources=(TENSOR,), rendezvous=number,
            )
            for rank, needed in zip(stage.ranks, after, strict=True)
        ]  # fmt: skip

    def _needed(self, phase: str, step: int, microbatch: int, place: int) -> tuple[int, ...]:
        """What a device of the first stage needs before a pass: tokens of the step before."""
        if phase == PREFILL:
            return ()
        if step > 1:
            return (self._tokens[step - 1, microbatch][place],)
        # Prefill and decode micro-batches may cut the batch differently.
        begin, size = microbatch * self._sizes.decode, self._sizes.prefill
        covering = range(begin // size, (begin + self._sizes.decode - 1) // size + 1)
        return tuple(self._tokens[0, m][place] for m in covering)

    def _hop(
        self, phase: str, step: int, microbatch: int, source: _Stage, target: _Stage,
        after: Sequence[int],
    ) -> list[int]:  # fmt: skip
        """A send and its receive for each device of a stage; returns the receives."""
        received = []
        for k, b in enumerate(target.ranks):
            a = source.ranks[k % len(source.ranks)]
            if (phase, a, b) not in self._messages:
                self._messages[phase, a, b] = self._message(phase, a, b, target)
            work, queues = self._messages[phase, a, b]
            sent = self._builder.add(
                "send", a, work, stage=target.index, microbatch=microbatch, step=step, peer=b,
                dependencies=(after[k % len(source.ranks)],), resources=queues,
            )  # fmt: skip
            received.append(
                self._builder.add(
                    "recv", b, HostLaunch(0), stage=target.index, microbatch=microbatch,
                    step=step, peer=a, dependencies=(sent,), resources=(),
                )
            )  # fmt: skip
        return received

    def _message(
        self, phase: str, a: int, b: int, target: _Stage
    ) -> tuple[Collective, tuple[str, ...]]:
        """What rank ``a`` sends to rank ``b`` of a stage after a pass, and the queues for it."""
        if target.first:
            size = TOKEN_BYTES * (self._sizes.prefill if phase == PREFILL else self._sizes.decode)
            dtype = "int64"
        else:
            size, dtype = self._pricing.hidden_bytes(phase, self._sizes), "bf16"
        ends = self._ranks[a], self._ranks[b]
        queues: tuple[str, ...] = (f"link:{a}>{b}",)
        if len(target.ranks) > 1 and ends[0].host != ends[1].host:
            # One link joins two hosts, whatever number of devices they have.
            queues = (*queues, f"{SHARED_PREFIX}{ends[0].host}>{ends[1].host}")
        return Collective("p2p", size, (ends[0].index, ends[1].index), dtype), queues

    def _work(self, phase: str, stage: _Stage, step: int) -> Segment:
        key = (phase, stage.sort, step)
        found = self._works.get(key)
        if found is None:
            found = self._works[key] = self._segment(phase, stage, step)
        return found

    def _segment(self, phase: str, stage: _Stage, step: int) -> Segment:
        pricing, sizes = stage.pricing, self._sizes
        context = None if phase == PREFILL else pricing.workload.prompt_tokens + step
        parts: Counter[Work] = Counter()
        if stage.first:
            _count(parts, pricing.embedding(phase, sizes), 1)
        decided = stage.decision
        layers = pricing.layers(stage.kernels, decided.start, decided.bits, phase, sizes, context)
        _count(parts, layers, 1)
        if stage.last:
            _count(parts, pricing.head(stage.kernels, phase, sizes), 1)
        return Segment(phase, tuple(parts.items()))

    def _exchanges(self, phase: str, stage: _Stage) -> tuple[tuple[Collective, int], ...]:
        return self._pricing.exchanges(
            phase, self._sizes, stage.decision.ranks, stage.layers, first=stage.first,
            last=stage.last,
        )  # fmt: skip

    def _sum(self, phase: str, stage: _Stage) -> Segment:
        """Everything that the devices of a stage exchange in a pass."""
        key = (phase, stage.index)
        if key not in self._sums:
            self._sums[key] = Segment("all_reduce", self._exchanges(phase, stage))
        return self._sums[key]

    def _pressure(self, phase: str, stage: _Stage) -> float:
        """Share of a pass that is bound by memory bandwidth; see `memory_share`."""
        key = (phase, stage.index)
        if key not in self._pressures:
            work = self._work(phase, stage, 0 if phase == PREFILL else 1)
            label = self._ranks[stage.ranks[0]].label
            self._pressures[key] = memory_share(self._pricing.costs, label, work)
        return self._pressures[key]


def _count(parts: Counter[Work], programs: tuple[tuple[Program, int], ...], times: int) -> None:
    for item, count in programs:
        parts[item] += count * times
