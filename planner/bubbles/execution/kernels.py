"""`BubbleKernels`: carries out one rank's passes, encoder units and collectives.

Every backbone stage and every encoder unit is a `Cut`, so that a backward pass can stop between any
two; `Handover` has what one action leaves for another. Gradients add up over micro-batches; losses
are means, so that nothing is scaled afterwards.

With tensor parallelism passes may be listed piece by piece, and units with their collectives apart;
such stages are `Pieces`. A ``tensor`` action then waits for the sum that the piece before started.

Attention is fused, so that ``selective`` recomputation, which leaves out its inside, is what every
run does; only ``full`` makes a difference.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foreplan.cost_models.costs import HostLaunch
from foreplan.cost_models.schedule import Action
from foreplan.datasets.timing.freed_memory import keep_freed_memory
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
from foreplan.planner.bubbles.execution.batches import Batches
from foreplan.planner.bubbles.execution.cut import Cut
from foreplan.planner.bubbles.execution.encoder_stage import EncoderStage
from foreplan.planner.bubbles.execution.flat_parameters import optimize
from foreplan.planner.bubbles.execution.handover import Handover, Key
from foreplan.planner.bubbles.execution.pieces import Pieces
from foreplan.planner.bubbles.execution.rank_parts import Buckets, RankParts
from foreplan.planner.bubbles.execution.recorded import (
    Graphs,
    Left,
    RecordableLanes,
    RecordedActions,
)
from foreplan.planner.bubbles.execution.report import gradient_report, loss_report
from foreplan.planner.bubbles.execution.step_sizes import StepSizes

_FREE = HostLaunch(0)


class BubbleKernels:
    """One rank of a decision; see `foreplan.planner.base.Kernels`.

    Args:
        step: what is trained.
        decision: who computes what.
        rank: which rank this is.
        device: where.
        dtype: of weights, activations and arithmetic; gradients and losses are fp32.
        lanes: tensor parallel processes of the rank, of which this is one.
        buckets: first and one past the last unit of each bucket of an encoder's stage; a collective
            carries one. All of the stage is one bucket if left out.

    Raises:
        SpecError: a rank that the decision has not; passes in pieces or units with collectives of
            their own where weights' gradients are put off, layers computed again, or units larger
            than half a layer.
    """

    keeps_buffers: bool = True
    keeps_collected: bool = True
    computes_nothing: frozenset[str] = frozenset({"beside"})

    def __init__(
        self,
        step: StepSizes,
        decision: BubblesDecision,
        rank: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        lanes: RecordableLanes | None = None,
        buckets: Buckets | None = None,
    ) -> None:
        if not 0 <= rank < len(decision.orders):
            raise SpecError("rank", got=rank, expected=f"0..{len(decision.orders) - 1}")
        self._step, self._decision, self._rank = step, decision, rank
        self._device = device or torch.device("cpu")
        if self._device.type == "cpu":
            keep_freed_memory()
        self._dtype = dtype
        self._lanes = lanes or RecordableLanes()
        self._words = parse_order(decision.orders[rank])
        built = RankParts(
            step, decision, rank, self._words, Batches(step, self._device, dtype), self._device,
            dtype, self._lanes, buckets,
        )  # fmt: skip
        self._batches = built.batches
        self._flat, self._stages, self._encoders = built.flat, built.stages, built.encoders
        self._ops: dict[str, Callable[[Action, list[Tensor]], None]] = {
            "F": self._forward, "B": self._backward, "I": self._backward_inputs,
            "W": self._backward_weights, ENCODE: self._encode,
            ENCODE_BACKWARD: self._encode_backward, "tensor": self._await_sum,
            "optimizer": self._optimize, **dict.fromkeys(self.computes_nothing, lambda *_: None),
        }  # fmt: skip
        self._handover = Handover(step, decision, rank, self._device, dtype)
        self._losses: dict[int, Tensor] = {}
        self._recorded: RecordedActions | None = None
        self._graphs: Graphs | None = None

    # ---------------------------------------------------------------------------- the Kernels' side

    def reset(self) -> None:
        """Forget the last step: gradients, losses, what was on its way, the optimizer's step."""
        for flat in self._flat.values():
            flat.reset()
        self._forget()

    def _forget(self) -> None:
        if self._recorded is not None:
            self._recorded.forget()
        for cut in self._cuts:
            cut.forget()
        self._handover.forget()
        self._losses.clear()

    def advance(self) -> None:
        """Begin the next step of a training run: as `reset`, but weights stay as they are."""
        for flat in self._flat.values():
            flat.advance()
        self._forget()

    def adopt(self, decision: BubblesDecision) -> None:
        """Carry out another order of the same parts from the next step on.

        It is recorded if the former was; gradients are zero afterwards.

        Args:
            decision: with the same layout, stages, units and ranks.

        Raises:
            SpecError: a decision with other parts, or one with passes in pieces where the former
                had none.
        """
        same = decision.plan == self._decision.plan and decision.stages == self._decision.stages
        slots = {"slots": ()}
        ours, theirs = (
            [plan.model_copy(update=slots) for plan in one.encoders]
            for one in (self._decision, decision)
        )
        if not same or ours != theirs:
            raise SpecError(
                "decision", got="other stages, units or ranks", expected="another order alone"
            )
        words = parse_order(decision.orders[self._rank])
        split = {word.stage for word in words if word.piece >= 0}
        apart = any(word.op in "fb" for word in words)
        built = {number for number, cut in self._stages.items() if isinstance(cut, Pieces)}
        if not split <= built or (apart and not all(e.apart for e in self._encoders.values())):
            raise SpecError("decision", got="passes in pieces", expected="whole ones, as before")
        self._decision, self._words = decision, words
        self._handover.adopt(decision)
        if self._graphs is not None:
            self.record(self._graphs)

    def losses(self) -> dict[int, float]:
        """Each micro-batch's share of the step's loss, where this rank has it."""
        return {i: float(loss) for i, loss in self._losses.items()}

    def rehearse(self) -> None:
        """Compute the rank's whole list once on whatever its buffers hold, and forget it.

        A step then finds every kernel loaded and all memory at hand. Between GPUs it has to:
        loading a kernel waits for the device, where a receive may already be waiting for a message
        that needs this kernel first.
        """
        for action in self._passes():
            self.run(action)
        self.run(Action("optimizer", self._rank, _FREE))
        self.reset()

    def record(self, graphs: Graphs) -> None:
        """Record all passes and units, so that `run` replays them; after `rehearse`.

        Gradients and weights stay where they are from step to step, so that the optimizer and the
        collectives of parameters, which are one call each, need not be recorded.

        Args:
            graphs: of this device, where the kernels were rehearsed; `adopt` uses them again.

        Raises:
            RuntimeError: something cannot be recorded.
        """
        self._forget()
        self._recorded = None  # what it holds is free for what is recorded now
        recorded = RecordedActions(graphs, self._lanes)
        for action in self._passes():
            sent, losses = self._handover.on_the_way, dict(self._losses)
            self._await_sum(action, [])
            taken = self._taken(action)  # what is made here lies outside of the graph
            with torch.autograd.set_multithreading_enabled(False):  # recording is a thread's own
                recorded.record(
                    action, partial(self._ops[action.op], action, taken),
                    partial(self._left_since, sent, losses),
                )  # fmt: skip
        self.advance()
        self._graphs, self._recorded = graphs, recorded

    def _left_since(self, sent: Mapping[Key, Tensor], losses: Mapping[int, Tensor]) -> Left:
        """What has been left since these were."""
        found = self._handover.on_the_way
        return Left(
            {key: found[key] for key in found.keys() - sent.keys()},
            {i: self._losses[i] for i in self._losses.keys() - losses.keys()},
        )

    def _passes(self) -> Iterator[Action]:
        """The rank's passes, pieces and units, in order."""
        for word in self._words:
            op, stage, step = word.op, word.stage, word.piece
            if word.op in "fb" or self._is_sum(word):
                continue  # the next piece waits for it itself
            if word.encoder >= 0:
                plan = self._decision.encoders[word.encoder]
                op = ENCODE if word.op == "F" else ENCODE_BACKWARD
                stage = self._decision.stage_number(word.encoder, plan.stage_of(word.unit))
                step = word.unit
            yield Action(op, self._rank, _FREE, stage, word.microbatch, step)

    def _is_sum(self, word: Step) -> bool:
        """Whether a word stands for the collective behind the last piece."""
        cut = self._stages[word.stage] if word.piece >= 0 else None
        return isinstance(cut, Pieces) and word.piece == len(cut)

    def run(self, action: Action) -> None:
        """Compute one action."""
        left = None if self._recorded is None else self._recorded.replay(action)
        if left is None:
            self._ops[action.op](action, self._taken(action))
            return
        self._handover.leave(left.handed)
        self._losses.update(left.losses)

    def payload(self, action: Action) -> Tensor:
        """What a send carries, or a bucket's gradients or weights for a collective."""
        if action.op == "send":
            return self._handover.leaving((action.stage, action.microbatch, action.step))
        flat = self._flat[action.stage, action.step]
        if action.op == "all_gather":
            return flat.weights
        if action.op == "reduce_scatter":
            flat.scattered()
        return flat.gradients

    def buffer(self, action: Action) -> Tensor:
        """Where a receive puts what it carries; the same memory in every step."""
        return self._handover.buffer((action.stage, action.microbatch, action.step))

    def result(self) -> dict[str, Any]:
        """Losses and gradients that this rank has, see `report`."""
        found = loss_report(self._losses, self._dtype)
        for flat in self._flat.values():
            found |= gradient_report(flat.gradient())
        return found

    def memory_bytes(self) -> dict[str, int]:
        """Bytes this rank holds by the ledger's items; ``buffers`` is what arrives and is sent."""
        found: dict[str, int] = defaultdict(int)
        for (stage, _), flat in self._flat.items():
            prefix = "" if stage < len(self._decision.stages) else "encoder_"
            for item, size in flat.memory_bytes().items():
                found[prefix + item] += size
        found["data"] = self._batches.bytes
        found["buffers"] = self._handover.bytes
        return dict(found)

    @property
    def live(self) -> int:
        """Micro-batches of stages and units that are between their two passes."""
        return sum(cut.live for cut in self._cuts)

    @property
    def _cuts(self) -> tuple[Cut | Pieces | EncoderStage, ...]:
        return (*self._stages.values(), *self._encoders.values())

    def _taken(self, action: Action) -> list[Tensor]:
        """What an action starts from: from other actions, or the data of an encoder."""
        op, number, microbatch = action.op, action.stage, action.microbatch
        keys: list[Key] = []
        if op in (ENCODE, ENCODE_BACKWARD):
            encoder, stage = self._decision.encoder_stage(number)
            backward = op == ENCODE_BACKWARD
            if not self._encoders[number].starts(action.step, backward=backward):
                return []
            if stage == 0 and not backward:
                return [self._batches.patches(encoder, microbatch)]
            keys = [(number, microbatch, 2 * encoder + (GRADIENT if backward else ACTIVATION))]
        elif action.step > 0:
            pass  # a later piece
        elif op == "F" and number == 0:
            encoders = range(len(self._decision.encoders))
            keys = [(0, microbatch, 2 * e + ACTIVATION) for e in encoders]
        elif op == "F":
            keys = [(number, microbatch, ACTIVATION)]
        elif op in "BI" and number < len(self._decision.stages) - 1:
            keys = [(number, microbatch, GRADIENT)]
        return [self._handover.take(key) for key in keys]

    # -------------------------------------------------------------------------------- the backbone

    def _forward(self, action: Action, inputs: list[Tensor]) -> None:
        stage, microbatch = action.stage, action.microbatch
        cut = self._stages[stage]
        if action.step >= 0 and isinstance(cut, Pieces):
            found = cut.forward_piece(microbatch, action.step, inputs)
            if found is None:
                return
            made = found
        else:
            made = cut.forward(microbatch, inputs)
        if stage == len(self._decision.stages) - 1:
            self._losses[microbatch] = made
        else:
            self._handover.give((stage + 1, microbatch, ACTIVATION), made)

    def _backward(self, action: Action, taken: list[Tensor]) -> None:
        self._turn_back(action, taken, weights=True)

    def _backward_inputs(self, action: Action, taken: list[Tensor]) -> None:
        self._turn_back(action, taken, weights=False)

    def _turn_back(self, action: Action, taken: list[Tensor], *, weights: bool) -> None:
        stage, microbatch = action.stage, action.microbatch
        gradient = next(iter(taken), None)
        cut = self._stages[stage]
        if action.step >= 0 and isinstance(cut, Pieces):
            turned = cut.backward_piece(microbatch, action.step, gradient)
            if turned is None:
                return
            found = turned
        else:
            found = cut.backward(microbatch, gradient, weights=weights)
        # The activation has been sent: a pass waits for what the same micro-batch sent before it.
        self._handover.sent((stage + 1, microbatch, ACTIVATION))
        if stage > 0:
            self._handover.give((stage - 1, microbatch, GRADIENT), found[0])
            return
        for encoder, plan in enumerate(self._decision.encoders):
            if found[encoder] is not None:
                number = self._decision.stage_number(encoder, len(plan.stages) - 1)
                self._handover.give((number, microbatch, 2 * encoder + GRADIENT), found[encoder])

    def _backward_weights(self, action: Action, _: list[Tensor]) -> None:
        self._stages[action.stage].backward_weights(action.microbatch)

    def _await_sum(self, action: Action, _: list[Tensor]) -> None:
        known = self._encoders.get(action.stage, self._stages.get(action.stage))
        if isinstance(known, Pieces | EncoderStage):
            known.wait(action.microbatch)

    def _optimize(self, action: Action, _: list[Tensor]) -> None:
        optimize(self._flat.values())

    # -------------------------------------------------------------------------------- the encoders

    def _encode(self, action: Action, taken: list[Tensor]) -> None:
        number, microbatch, unit = action.stage, action.microbatch, action.step
        encoder, stage = self._decision.encoder_stage(number)
        made = self._encoders[number].forward(unit, microbatch, next(iter(taken), None))
        if made is not None:
            last = stage == len(self._decision.encoders[encoder].stages) - 1
            receiver = 0 if last else number + 1
            self._handover.give((receiver, microbatch, 2 * encoder + ACTIVATION), made)

    def _encode_backward(self, action: Action, taken: list[Tensor]) -> None:
        number, microbatch, unit = action.stage, action.microbatch, action.step
        encoder, stage = self._decision.encoder_stage(number)
        gradient = next(iter(taken), None)
        if gradient is not None:
            for receiver in (0, number + 1):
                self._handover.sent((receiver, microbatch, 2 * encoder + ACTIVATION))
        found = self._encoders[number].backward(unit, microbatch, gradient)
        if found is not None and stage > 0:
            self._handover.give((number - 1, microbatch, 2 * encoder + GRADIENT), found)
