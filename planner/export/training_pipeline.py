"""`TrainingPipeline`: what a bubble plan asks of a training framework, in terms that each knows.

A framework's own schedules have no word for encoder work between passes of the backbone, so every
export carries the table of encoder units beside its flags (`order_csv`): who inserts units reads
there which one stands behind how many passes of a rank.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from foreplan.datasets.specs import validate
from foreplan.errors import SpecError
from foreplan.planner.bubbles.decision import BubblesDecision
from foreplan.planner.bubbles.execution.order_csv import backbone_csv, encoder_csv, read_orders
from foreplan.planner.bubbles.spec import BubblesWorkload
from foreplan.planner.plan import Plan, decision_of

#: File of the encoder units' table, and of the backbone's order.
UNITS, ORDER = "encoder_units.csv", "order.csv"
#: Word of torchrun's for the processes of a host, where hosts have unlike numbers of them.
_PROCESSES = "PET_NPROC_PER_NODE"


@dataclass(frozen=True, slots=True)
class TrainingPipeline:
    """The layout and order of a bubble plan.

    Attributes:
        dp, pp, tp: replicas, pipeline ranks, tensor parallel devices of each.
        layers: of each virtual stage, in the order of the model; dealt to the ranks in turn.
        microbatch: samples of a micro-batch.
        batch: samples of a step.
        orders: of each rank, backbone and encoder units.
        recompute: what the backbone computes again: ``none``, ``selective`` or ``full``.
    """

    dp: int
    pp: int
    tp: int
    layers: tuple[int, ...]
    microbatch: int
    batch: int
    orders: tuple[str, ...]
    recompute: str = "selective"

    @classmethod
    def of(cls, plan: Plan) -> TrainingPipeline:
        """Read a plan.

        Raises:
            SpecError: another kind of plan, stages that are not dealt to the ranks in turn.
        """
        decision = decision_of(plan)
        if not isinstance(decision, BubblesDecision):
            raise SpecError("plan.kind", got=plan.kind, expected="bubbles, for this target")
        workload = validate(BubblesWorkload, plan.workload, "plan: workload")
        layout, stages = decision.plan, decision.stages
        for number, stage in enumerate(stages):
            if stage.rank != number % layout.pp or len(stages) % layout.pp:
                raise SpecError(
                    f"decision.stages[{number}]", got=f"rank {stage.rank} of {len(stages)} stages",
                    expected="stages dealt to the ranks in turn, as many on each",
                )  # fmt: skip
        samples = layout.dp * decision.microbatches * workload.microbatch
        return cls(
            layout.dp, layout.pp, layout.tp, tuple(s.end - s.start for s in stages),
            workload.microbatch, samples, read_orders(*tables(plan)),
            decision.recompute.backbone if decision.recompute else workload.recompute,
        )  # fmt: skip

    @property
    def chunks(self) -> int:
        """Virtual stages of a rank."""
        return len(self.layers) // self.pp

    @property
    def even(self) -> bool:
        """Whether all virtual stages have as many layers."""
        return len(set(self.layers)) == 1


def torchrun_command(plan: Plan) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """``torchrun`` with as many processes as the plan has devices, and notes for its script.

    Frameworks number ranks by pipeline rank first, ``torchrun`` by host: hosts are named in the
    order of the pipeline.
    """
    decision = decision_of(plan)
    assert isinstance(decision, BubblesDecision)
    layout, ranks = decision.plan, plan.cluster.ranks()
    width = layout.dp * layout.tp
    blocks = [layout.block(rank) * width for rank in range(layout.pp)]
    hosts = [one.host for start in blocks for one in ranks[start : start + width]]
    runs = [(host, len(list(same))) for host, same in itertools.groupby(hosts)]
    counts = [count for _, count in runs]
    alike = (f"--nproc-per-node={counts[0]}",) if len(set(counts)) == 1 else ()
    if len(runs) == 1:
        return ("torchrun", *alike), ()
    said: dict[str, Sequence[object]] = {
        "PET_NODE_RANK": range(len(runs)),
        "PET_MASTER_ADDR": (runs[0][0],),
    }
    if not alike:
        said[_PROCESSES] = counts
    texts = (f"{name}={', '.join(map(str, values))}" for name, values in said.items())
    note = (
        f"once on each of {', '.join(host for host, _ in runs)}, in this order with "
        f"{'; '.join(texts)} in the environment"
    )
    return ("torchrun", f"--nnodes={len(runs)}", *alike), (note,)


def processes(script: str) -> int:
    """Processes that a script with a `torchrun_command` starts on all hosts together."""
    if (unlike := re.search(rf"{_PROCESSES}=([\d, ]+)", script)) is not None:
        return sum(map(int, unlike[1].split(",")))
    return math.prod(map(int, re.findall(r"--(?:nnodes|nproc-per-node)=(\d+)", script)))


def encoders_again(plan: Plan) -> tuple[str, ...]:
    """A line on the encoders whose units are computed again, for which no framework has a flag."""
    decision = decision_of(plan)
    assert isinstance(decision, BubblesDecision)
    workload = validate(BubblesWorkload, plan.workload, "plan: workload")
    again = [encoder.recompute is True for encoder in workload.encoders]
    if decision.recompute is not None:
        again = list(decision.recompute.encoders)
    names = [e.name for e, yes in zip(workload.encoders, again, strict=True) if yes]
    if not names:
        return ()
    return (f"recomputation of encoders: the plan keeps the input of each unit of "
            f"{', '.join(names)} alone",)  # fmt: skip


def placed(plan: Plan) -> tuple[str, ...]:
    """A line on the device of each pipeline rank, where these are not in the cluster's order."""
    decision = decision_of(plan)
    assert isinstance(decision, BubblesDecision)
    if decision.plan.device_order is None:
        return ()
    labels, layout = [rank.label for rank in plan.cluster.ranks()], decision.plan
    width = layout.dp * layout.tp
    names = ", ".join(labels[layout.block(rank) * width] for rank in range(layout.pp))
    return (f"devices: ranks of the pipeline take {names}, in this order, as hosts have to be "
            "numbered",)  # fmt: skip


def tables(plan: Plan) -> tuple[str, str]:
    """The backbone's order in PyTorch's form, and the table of encoder units."""
    decision = decision_of(plan)
    assert isinstance(decision, BubblesDecision)
    return backbone_csv(decision), encoder_csv(decision)
