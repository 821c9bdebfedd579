"""`StepSizes`: the sizes of everything that a training step computes, with nothing left open."""

from __future__ import annotations

from dataclasses import dataclass

from foreplan.errors import SpecError
from foreplan.planner.base import Problem
from foreplan.planner.bubbles.decision import BubblesDecision
from foreplan.planner.bubbles.recompute import settled
from foreplan.planner.bubbles.spec import BubblesWorkload
from foreplan.planner.bubbles.towers import Tower, backbone_tower, encoder_towers


@dataclass(frozen=True, slots=True)
class StepSizes:
    """See the module.

    Attributes:
        workload: what is trained; its ``encoders`` say which are frozen or recompute.
        backbone: the language model.
        encoders: in the workload's order, which is that of their features in the sequence.
        microbatches: micro-batches of a step.
        seed: of weights and data.
    """

    workload: BubblesWorkload
    backbone: Tower
    encoders: tuple[Tower, ...]
    microbatches: int
    seed: int = 0

    @classmethod
    def of(cls, problem: Problem[BubblesWorkload], decision: BubblesDecision) -> StepSizes:
        """The step that a decision plans.

        Raises:
            SpecError: positions of an encoder that cannot be averaged in equal groups to the
                number of its features; no sizes of the backbone, see `backbone_tower`.
        """
        for encoder in problem.workload.encoders:
            positions = encoder.tokens * encoder.images
            if positions % encoder.features:
                raise SpecError(
                    f"encoder {encoder.name}: projected_tokens", got=encoder.features,
                    expected=f"a divisor of its {positions} positions, which a real run averages "
                    "in equal groups",
                )  # fmt: skip
        return cls(
            settled(problem, decision).workload, backbone_tower(problem), encoder_towers(problem),
            decision.microbatches, problem.seed,
        )  # fmt: skip

    @property
    def text_tokens(self) -> int:
        """Positions of the backbone's sequence that hold embedded tokens."""
        encoders = self.workload.encoders
        return self.workload.sequence_length - sum(encoder.features for encoder in encoders)

    def sequences(self, encoder: int) -> int:
        """Sequences that an encoder sees of one micro-batch."""
        return self.workload.microbatch * self.workload.encoders[encoder].images
