"""A serving decision as a `Schedule`: prefill streamed through the stages, then decode round-robin.

Steps are numbered by the token they produce: step 0 is prefill, step t > 0 decodes token t. A
stage's list holds all of its prefill micro-batches and then, step by step, its decode
micro-batches. Hidden states travel to the next stage, token ids from the last stage to the first;
both beside the computation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from foreplan.cost_models.costs import Collective, HostLaunch, Segment, Work
from foreplan.cost_models.schedule import COMPUTE, MOST_ACTIONS, Schedule, ScheduleBuilder
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.program import Program, Variant
from foreplan.errors import SpecError
from foreplan.planner.predict import memory_share
from foreplan.planner.serving.pricing import DECODE, PREFILL, MicroBatches, Pricing, StageKernels
from foreplan.planner.serving.spec import ServingDecision, StageDecision

TOKEN_BYTES = 8  # token ids are int64
#: Most tokens that a schedule decodes one after another.
MOST_STEPS = 1 << 17


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
    first: bool
    last: bool


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
        self._decision = decision
        self._sizes = MicroBatches(decision.prefill_microbatch, decision.decode_microbatch)
        self._ranks = [cluster.ranks()[stage.rank] for stage in decision.stages]
        count = len(decision.stages)
        self._stages = [
            _Stage(i, stage, stage_kernels(stage), i == 0, i == count - 1)
            for i, stage in enumerate(decision.stages)
        ]
        self._builder = ScheduleBuilder([rank.label for rank in self._ranks])
        # (step, micro-batch of that step's phase) -> action that put the token ids on stage 0.
        self._tokens: dict[tuple[int, int], int] = {}
        self._works: dict[tuple[str, int, int], Segment] = {}
        self._pressures: dict[tuple[str, int], float] = {}

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
        for step in range(1, workload.new_tokens):
            for microbatch in range(decodes):
                last = step == workload.new_tokens - 1
                self._pass(DECODE, step, microbatch, self._closing or not last)
        return self._builder.build()

    def _pass(self, phase: str, step: int, microbatch: int, return_tokens: bool) -> None:
        """One micro-batch through every stage, and its tokens back to the first."""
        builder, last = self._builder, len(self._stages) - 1
        arrived: tuple[int, ...] = self._needed(phase, step, microbatch)
        done = -1
        for stage in self._stages:
            if not stage.first:
                arrived = (self._hop(phase, step, microbatch, stage.index - 1, stage.index, done),)
            done = builder.add(
                phase, stage.index, self._work(phase, stage, step), stage=stage.index,
                microbatch=microbatch, step=step, dependencies=arrived, resources=(COMPUTE,),
                pressure=self._pressure(phase, stage),
            )  # fmt: skip
        if return_tokens:
            if last:
                done = self._hop(phase, step, microbatch, last, 0, done)
            self._tokens[step, microbatch] = done

    def _needed(self, phase: str, step: int, microbatch: int) -> tuple[int, ...]:
        """What has to be on the first stage before a pass: the tokens of the step before."""
        if phase == PREFILL:
            return ()
        if step > 1:
            return (self._tokens[step - 1, microbatch],)
        # Prefill and decode micro-batches may cut the batch differently.
        begin, size = microbatch * self._sizes.decode, self._sizes.prefill
        covering = range(begin // size, (begin + self._sizes.decode - 1) // size + 1)
        return tuple(self._tokens[0, m] for m in covering)

    def _hop(
        self, phase: str, step: int, microbatch: int, source: int, target: int, after: int
    ) -> int:
        """A send and its receive; returns the receive."""
        if target == 0:
            size = TOKEN_BYTES * (self._sizes.prefill if phase == PREFILL else self._sizes.decode)
            dtype = "int64"
        else:
            size, dtype = self._pricing.hidden_bytes(phase, self._sizes), "bf16"
        ends = (self._ranks[source].index, self._ranks[target].index)
        sent = self._builder.add(
            "send", source, Collective("p2p", size, ends, dtype), stage=target,
            microbatch=microbatch, step=step, peer=target, dependencies=(after,),
            resources=(f"link:{source}>{target}",),
        )  # fmt: skip
        return self._builder.add(
            "recv", target, HostLaunch(0), stage=target, microbatch=microbatch, step=step,
            peer=source, dependencies=(sent,), resources=(),
        )  # fmt: skip

    def _work(self, phase: str, stage: _Stage, step: int) -> Segment:
        key = (phase, stage.index, step)
        if key not in self._works:
            self._works[key] = self._segment(phase, stage, step)
        return self._works[key]

    def _segment(self, phase: str, stage: _Stage, step: int) -> Segment:
        pricing, sizes = self._pricing, self._sizes
        context = None if phase == PREFILL else pricing.workload.prompt_tokens + step
        parts: Counter[Work] = Counter()
        if stage.first:
            _count(parts, pricing.embedding(phase, sizes), 1)
        for bits, layers in Counter(stage.decision.bits).items():
            _count(parts, pricing.layer(stage.kernels, bits, phase, sizes, context), layers)
        if stage.last:
            _count(parts, pricing.head(stage.kernels, phase, sizes), 1)
        return Segment(phase, tuple(parts.items()))

    def _pressure(self, phase: str, stage: _Stage) -> float:
        """Share of a pass that is bound by memory bandwidth; see `memory_share`."""
        key = (phase, stage.index)
        if key not in self._pressures:
            work = self._work(phase, stage, 0 if phase == PREFILL else 1)
            rank = self._ranks[stage.index]
            self._pressures[key] = memory_share(self._pricing.costs, rank.label, work)
        return self._pressures[key]


def _count(parts: Counter[Work], programs: tuple[tuple[Program, int], ...], times: int) -> None:
    for item, count in programs:
        parts[item] += count * times
