"""One stage of a serving decision in its rank's process; imports torch.

Token ids live on the first stage in one tensor ``[batch]``: prefill and decode micro-batches cut it
differently. Modes: ``fast`` runs the planned kernels greedily; ``reference`` runs fp32 arithmetic
on the dequantised weights, where a distributed run must equal one process token for token;
``forced`` runs the planned kernels on given tokens (teacher forcing), so that one early difference
between instruction sets does not change everything after it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from foreplan.cost_models.costs import CostBook
from foreplan.cost_models.schedule import Action, Schedule
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.models.model import Model
from foreplan.datasets.models.weights import open_weights
from foreplan.errors import SpecError
from foreplan.planner.base import Agreement
from foreplan.planner.serving.pipeline import ServingSchedule, stage_kernels
from foreplan.planner.serving.pricing import DECODE, PREFILL, Pricing
from foreplan.planner.serving.spec import ServingDecision, ServingWorkload, StageDecision
from foreplan.planner.serving.workspace import MOST_RECORDED_LAYERS
from foreplan.planner.verify.allocator import growing_segments
from foreplan.planner.verify.decoder import DecoderStage
from foreplan.planner.verify.pass_graphs import PassGraphs
from foreplan.planner.verify.stage_kernels import PhaseKernels, StageKernels

MODES = ("fast", "reference", "forced")
#: Logits of each token that a forced run reports, spread evenly over the vocabulary.
SAMPLED_LOGITS = 64
#: Teacher-forced choices that must agree where ranks have unlike instruction sets.
LEAST_AGREEMENT = 0.98


class Recorder(Protocol):
    """See `PassGraphs`."""

    def warm_up(self, body: Callable[[], None]) -> None:
        """Run a call once for real."""
        ...

    def record(self, body: Callable[[], None]) -> Callable[[], None]:
        """What does the same as ``body`` at less cost to the host."""
        ...


class ServingKernels:
    """Carries out the actions of one stage; see `foreplan.planner.base.Kernels`.

    Args:
        model: the model.
        workload: batch, prompt and new tokens.
        decision: all stages; their order is the ranks' order.
        rank: which stage this is.
        mode: one of `MODES`.
        seed: of prompts, forced tokens and random weights.
        recorder: records the passes; on a GPU, unless the mode is ``reference`` or experts are
            called one by one, a `PassGraphs` if left out, on a processor none.

    Attributes:
        recordable: whether a pass can be recorded at all.
        keeps_buffers: messages arrive in the same memory in every run. A micro-batch has one buffer
            for all of its decode steps: none is sent before the token of the step before has gone
            round all stages, which every reader of that step has come before.

    Raises:
        SpecError: an unknown mode or rank, kernels that do not fit the model.
    """

    recordable: ClassVar[bool] = True
    keeps_buffers: ClassVar[bool] = True

    def __init__(
        self, model: Model, workload: ServingWorkload, decision: ServingDecision, rank: int,
        mode: str, seed: int, recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        if mode not in MODES:
            raise SpecError("mode", got=mode, expected=f"one of {', '.join(MODES)}")
        if not 0 <= rank < len(decision.stages):
            raise SpecError("rank", got=rank, expected=f"0..{len(decision.stages) - 1}")
        chosen = decision.stages[rank]
        self._workload, self._mode = workload, mode
        self._first, self._last = rank == 0, rank == len(decision.stages) - 1
        self._size = {PREFILL: decision.prefill_microbatch, DECODE: decision.decode_microbatch}
        self._device = _torch_device(chosen.device)
        batch, prompt = workload.batch, workload.prompt_tokens
        # What messages arrive in, before the segments in which other processes could not open it.
        dtype = torch.float32 if mode == "reference" else torch.bfloat16
        rows = {PREFILL: self._size[PREFILL] * prompt, DECODE: self._size[DECODE]}
        self._tokens = torch.zeros(batch, dtype=torch.int64, device=self._device)
        self._hidden = {
            (phase, i): torch.empty(rows[phase], model.hidden, dtype=dtype, device=self._device)
            for phase in (PREFILL, DECODE)
            for i in range(batch // self._size[phase])
            if not self._first
        }
        with growing_segments(self._device):
            self._prepare(model, chosen, mode, seed, recorder)

    def _prepare(
        self, model: Model, chosen: StageDecision, mode: str, seed: int,
        recorder: Recorder | None,
    ) -> None:  # fmt: skip
        """Load the stage and record its passes."""
        workload = self._workload
        batch, prompt, new = workload.batch, workload.prompt_tokens, workload.new_tokens
        self._stage = self._make_stage(
            model, chosen.start, chosen.end,
            prefill_batches=(self._size[PREFILL],) * (batch // self._size[PREFILL]),
            decode_batches=(self._size[DECODE],) * (batch // self._size[DECODE]),
            prompt=prompt, positions=prompt + new, device=str(self._device),
            reference=mode == "reference",
        )  # fmt: skip
        load_stage(self._stage, model, chosen, seed)
        self._stage.keep_logits = mode == "forced"
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(model.vocab, (batch, prompt + new), generator=generator)
        self._prompts = ids[:, :prompt].contiguous().to(self._device)
        self._forced = ids[:, prompt:].contiguous().to(self._device)
        self._made: dict[tuple[str, int], Tensor] = {}
        self._chosen = torch.zeros(batch, new, dtype=torch.int64, device=self._device)
        words = self._words()
        self._every = max(1, words // SAMPLED_LOGITS)
        samples = -(-words // self._every) if self._last and mode == "forced" else 0
        self._sampled = torch.zeros(new, batch, samples, device=self._device)
        self._recorded: dict[tuple[str, int, int], Callable[[], None]] = {}
        self._results: dict[tuple[str, int], Tensor] = {}
        records = self._device.type == "cuda" and mode != "reference" and self._stage.recordable
        if recorder is None and records:
            recorder = PassGraphs(self._device)
        if recorder is not None and self.recordable:
            self._record(recorder, MOST_RECORDED_LAYERS // (chosen.end - chosen.start))

    def _make_stage(self, model: Model, start: int, end: int, **options: Any) -> DecoderStage:
        return DecoderStage(model, start, end, **options)

    def _words(self) -> int:
        """Words whose logits this process knows."""
        return self._stage.model.vocab

    def _record(self, recorder: Recorder, most: int) -> None:
        """Record every pass of a run, with its result in a buffer that stays."""
        passes = list(self._passes())
        shapes = {(phase, i): self._result_shape(phase) for phase, i, _ in passes}
        dtype = torch.int64 if self._last else torch.bfloat16
        out = {
            key: torch.empty(shape, dtype=dtype, device=self._device)
            for key, shape in shapes.items()
        }

        def body(phase: str, index: int, step: int) -> None:
            out[phase, index].copy_(self._pass(phase, index, step))

        # Kernels of the first and of the longest context may differ.
        for each in {(phase, step): (phase, i, step) for phase, i, step in passes
                     if step in (0, 1, self._workload.new_tokens - 1)}.values():  # fmt: skip
            recorder.warm_up(partial(body, *each))
        for each in passes[:most]:
            self._recorded[each] = recorder.record(partial(body, *each))
        self._results = out

    def _passes(self) -> Iterator[tuple[str, int, int]]:
        """(phase, micro-batch, step) of every pass of a run, in order."""
        batch = self._workload.batch
        for index in range(batch // self._size[PREFILL]):
            yield PREFILL, index, 0
        for step in range(1, self._workload.new_tokens):
            for index in range(batch // self._size[DECODE]):
                yield DECODE, index, step

    def _result_shape(self, phase: str) -> tuple[int, ...]:
        size = self._size[phase]
        if self._last:
            return (size,)
        tokens = self._workload.prompt_tokens if phase == PREFILL else 1
        return (size * tokens, self._stage.model.hidden)

    def reset(self) -> None:
        """Forget the tokens of the last run; caches are written again from the start."""
        self._tokens.zero_()
        self._chosen.zero_()
        self._sampled.zero_()
        self._made.clear()

    def run(self, action: Action) -> None:
        """Take a micro-batch through the stage."""
        phase, index, step = action.op, action.microbatch, action.step
        replay = self._recorded.get((phase, index, step))
        if replay is None:
            self._made[phase, index] = self._pass(phase, index, step)
        else:
            replay()
            self._made[phase, index] = self._results[phase, index]

    def _pass(self, phase: str, index: int, step: int) -> Tensor:
        """Take a micro-batch through the stage, kernel by kernel."""
        x = self._input(phase, index, step)
        if phase == PREFILL:
            made = self._stage.prefill(index, x)
        else:
            made = self._stage.decode(index, step, x)
        return self._keep(phase, index, step, made)

    def _input(self, phase: str, index: int, step: int) -> Tensor:
        """What a pass begins with: token ids on the first stage, else hidden states."""
        if self._first and phase == PREFILL:
            return self._prompts[self._rows(phase, index)]
        return self._fed(index, step) if self._first else self._hidden[phase, index]

    def _keep(self, phase: str, index: int, step: int, made: Tensor) -> Tensor:
        """Note the tokens that a pass has made, on the last stage."""
        if self._last:
            rows = self._rows(phase, index)
            self._chosen[rows, step] = made
            if self._stage.logits is not None:
                self._sampled[step, rows] = self._stage.logits[:, :: self._every].float()
            if self._first:
                self._tokens[rows] = made
        return made

    def payload(self, action: Action) -> Tensor:
        """What the micro-batch's last pass made: hidden states, or token ids on the last stage."""
        return self._made[PREFILL if action.step == 0 else DECODE, action.microbatch]

    def buffer(self, action: Action) -> Tensor:
        """Where hidden states, or on the first stage token ids, arrive."""
        phase = PREFILL if action.step == 0 else DECODE
        if self._first:
            return self._tokens[self._rows(phase, action.microbatch)]
        return self._hidden[phase, action.microbatch]

    def result(self) -> dict[str, Any]:
        """Tokens ``[batch, new_tokens]``, of a forced run sampled logits too; last stage only.

        Logits are ``[new_tokens, batch, samples]``.
        """
        if not self._last:
            return {}
        found: dict[str, Any] = {"tokens": self._chosen.tolist()}
        if self._sampled.numel():
            found["logits"] = self._sampled.tolist()
        return found

    def memory_bytes(self) -> dict[str, int]:
        """Bytes held by the ledger's items; the workspace is only held while a pass runs."""
        return {name: size for name, size in self._stage.memory_bytes().items() if size}

    def _rows(self, phase: str, index: int) -> slice:
        size = self._size[phase]
        return slice(index * size, (index + 1) * size)

    def _fed(self, index: int, step: int) -> Tensor:
        rows = self._rows(DECODE, index)
        return self._forced[rows, step - 1] if self._mode == "forced" else self._tokens[rows]


def load_stage(stage: DecoderStage, model: Model, chosen: StageDecision, seed: int) -> None:
    """Load a stage's weights with the kernels of its decision.

    Args:
        stage: made for its layers.
        model: whose weights; the whole one where the stage has a share of it.
        chosen: its part of the decision.
        seed: of random weights.

    Raises:
        SpecError: kernels that do not fit the model or the device.
    """
    table = stage_kernels(chosen)

    def both(op: str, bits: int | None = None) -> PhaseKernels:
        return PhaseKernels(table.variant(PREFILL, op, bits), table.variant(DECODE, op, bits))

    stage.load(
        open_weights(model, seed=seed, device=stage.device),
        StageKernels(
            layers=tuple(both("linear", bits) for bits in chosen.bits),
            attention=both("attention"),
            head=both("head") if stage.last else None,
        ),
    )


def stage_kernels_of(
    model: Model, workload: ServingWorkload, decision: ServingDecision, rank: int, mode: str,
    seed: int,
) -> ServingKernels:  # fmt: skip
    """The kernels of a rank of a run: of a stage, or of its part of one."""
    stage, lane = decision.place(rank)
    if decision.stages[stage].degree == 1:
        return ServingKernels(model, workload, decision, stage, mode, seed)
    from foreplan.planner.serving.shard_kernels import ShardKernels

    return ShardKernels(model, workload, decision, stage, mode, seed, lane=lane)


def single_process_tokens(
    model: Model, cluster: Cluster, workload: ServingWorkload, decision: ServingDecision, mode: str,
    seed: int,
) -> dict[str, Any]:  # fmt: skip
    """What the last stage of a run must report, computed by all ranks in this process."""
    pricing = Pricing(model, workload, CostBook(()))
    schedule = ServingSchedule(pricing, cluster, decision).pieces()
    ranks = [
        stage_kernels_of(model, workload, decision, rank, mode, seed)
        for rank in range(len(decision.ranks))
    ]
    return walk(schedule, decision, ranks)


def walk(
    schedule: Schedule, decision: ServingDecision, ranks: Sequence[ServingKernels]
) -> dict[str, Any]:
    """Carry out a schedule in this process; what its last stage reports.

    Args:
        schedule: whose actions are listed in an order that one process can follow.
        decision: knows which ranks share a stage.
        ranks: kernels of every rank.
    """
    meetings: dict[int, list[Action]] = {}
    for action in schedule:
        if action.op == "recv":
            sent = next(schedule[i] for i in action.dependencies)
            ranks[action.rank].buffer(action).copy_(ranks[sent.rank].payload(sent))
        elif action.rendezvous >= 0:
            here = meetings.setdefault(action.rendezvous, [])
            here.append(action)
            stage, _ = decision.place(action.rank)
            if len(here) == decision.stages[stage].degree:
                # What is gathered is zero where it is another rank's, so that it is a sum too.
                parts = [ranks[each.rank].payload(each) for each in meetings.pop(action.rendezvous)]
                total = functools.reduce(torch.add, parts)
                for part in parts:
                    part.copy_(total)
        elif action.op != "send":
            ranks[action.rank].run(action)
    return next(found for rank in ranks if (found := rank.result()))


def compare_tokens(result: dict[str, Any], reference: dict[str, Any], mode: str) -> Agreement:
    """Share of equal tokens and, of a forced run, the largest difference of a sampled logit."""
    mine, theirs = torch.tensor(result["tokens"]), torch.tensor(reference["tokens"])
    same = float((mine == theirs).float().mean()) if mine.shape == theirs.shape else 0.0
    details: dict[str, float | str] = {"equal_tokens": same}
    if "logits" in result and "logits" in reference:
        logits, expected = torch.tensor(result["logits"]), torch.tensor(reference["logits"])
        details["largest_logit_difference"] = float((logits - expected).abs().max())
        details["largest_logit"] = float(expected.abs().max())
    exact = same == 1.0
    passed = same >= LEAST_AGREEMENT if mode == "forced" else exact
    return Agreement(passed, exact, details)


def _torch_device(label: str) -> torch.device:
    """The device of this process: its current GPU for a GPU rank, else the processor."""
    if "/cuda" in label:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
