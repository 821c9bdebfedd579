"""`StepProfile`: how long each pass and each encoder unit of a decision takes when it runs alone.

All ranks run in one process (`OneProcess`) on one device, a whole training step at a time, so that
caches and allocator are as in a step; only what runs beside them on other devices is missing. The
medians price the works of the decision's schedule, or become the ``layer_forward_s`` and
``layer_backward_s`` that a workload may state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from foreplan.cost_models.costs import Work
from foreplan.cost_models.schedule import Action, Schedule
from foreplan.errors import SpecError
from foreplan.planner.base import Kernels, Problem
from foreplan.planner.bubbles.actions import ENCODE, ENCODE_BACKWARD
from foreplan.planner.bubbles.decision import BubblesDecision
from foreplan.planner.bubbles.execution.cut import Cut
from foreplan.planner.bubbles.execution.flat_parameters import FlatParameters
from foreplan.planner.bubbles.execution.one_process import OneProcess
from foreplan.planner.bubbles.execution.parts import BackbonePart, EncoderPart
from foreplan.planner.bubbles.execution.step_sizes import StepSizes
from foreplan.planner.bubbles.spec import BubblesWorkload
from foreplan.planner.verify.clock import Clock, CudaClock, HostClock

#: Steps that are run before any is timed: allocators, caches and clocks settle.
WARMUP = 2
#: Micro-batches that pass through a layer in one timed round.
_REPEATS = 4


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one kind of action over rounds and micro-batches.

    Attributes:
        median_s: median.
        low_s, high_s: 5th and 95th percentile.
        count: how many were timed.
    """

    median_s: float
    low_s: float
    high_s: float
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Summary of a sample."""
        low, median, high = np.percentile(seconds, [5, 50, 95])
        return cls(float(median), float(low), float(high), len(seconds))


@dataclass(frozen=True)
class StepProfile:
    """See the module.

    Attributes:
        device: what it was measured on.
        timings: by name: ``0F``, ``0B`` (also ``I``, ``W``) of virtual stages, ``e0.2F``, ``e0.2B``
            of encoder units, ``optimizer``.
        prices: median seconds of every work of the schedule that was timed.
    """

    device: str
    timings: Mapping[str, Timing]
    prices: Mapping[Work, float]

    def document(self) -> dict[str, Any]:
        """As JSON, without works."""
        return {
            "device": self.device,
            "timings": {
                name: {"median_s": t.median_s, "low_s": t.low_s, "high_s": t.high_s,
                       "count": t.count}
                for name, t in self.timings.items()
            },
        }  # fmt: skip


def profile_step(
    schedule: Schedule,
    decision: BubblesDecision,
    kernels: Sequence[Kernels],
    device: torch.device,
    *,
    rounds: int = 5,
) -> StepProfile:
    """Time a decision's actions one by one.

    Args:
        schedule: the decision's.
        decision: names encoders and units.
        kernels: of every rank, on ``device``.
        device: where; a processor should be pinned and idle.
        rounds: timed steps.

    Raises:
        SpecError: no rounds, or a schedule that deadlocks.
    """
    if rounds < 1:
        raise SpecError("rounds", got=rounds, expected="at least 1")
    process, actions = OneProcess(schedule, kernels), tuple(schedule)
    clock = _clock(len(actions), device)
    named: dict[str, list[float]] = defaultdict(list)
    worked: dict[Work, list[float]] = defaultdict(list)
    for number in range(-WARMUP, rounds):
        process.step(clock)
        starts, ends = clock.stamps()
        if number < 0:
            continue
        for action, start, end in zip(actions, starts, ends, strict=True):
            name = _name(action, decision)
            if name is not None:
                named[name].append((end - start) * 1e-9)
                worked[action.work].append((end - start) * 1e-9)
    return StepProfile(
        _device_name(device),
        MappingProxyType({name: Timing.of(values) for name, values in sorted(named.items())}),
        MappingProxyType({work: float(np.median(values)) for work, values in worked.items()}),
    )


def layer_times(
    problem: Problem[BubblesWorkload],
    decision: BubblesDecision,
    device: torch.device,
    dtype: torch.dtype,
    *,
    rounds: int = 5,
) -> dict[str, tuple[Timing, Timing]]:
    """Forward and backward time of one layer of each tower, without what stands at its ends.

    Args:
        problem: what is trained.
        decision: says the number of micro-batches.
        device: where.
        dtype: of the arithmetic.
        rounds: timed rounds of a few micro-batches.

    Returns:
        By name: ``backbone`` and the encoders' names. A frozen encoder's backward times are 0.
    """
    sizes = StepSizes.of(problem, decision)
    # Layer 1 of a tower of three more layers has neither embedding nor head nor projector.
    deeper = replace(
        sizes,
        backbone=replace(sizes.backbone, layers=sizes.backbone.layers + 2),
        encoders=tuple(replace(t, layers=t.layers + 2) for t in sizes.encoders),
    )
    work = sizes.workload
    backbone = BackbonePart(deeper, 1, 2)
    shape = work.microbatch, work.sequence_length, sizes.backbone.hidden
    text = torch.empty(0, device=device)
    found = {
        "backbone": _layer(
            backbone, Cut(lambda inputs, _: backbone(inputs, text), [True]), shape, device, dtype,
            rounds,
        )
    }  # fmt: skip
    for e, spec in enumerate(work.encoders):
        part = EncoderPart(deeper, e, 2, 4)
        cut = Cut(
            lambda inputs, _, part=part: part(*inputs),  # type: ignore[misc]  # bound at once
            [True], frozen=spec.frozen, recompute=bool(spec.recompute),
        )  # fmt: skip
        shape = sizes.sequences(e), spec.tokens, sizes.encoders[e].hidden
        found[spec.name] = _layer(part, cut, shape, device, dtype, rounds, frozen=spec.frozen)
    return found


def with_measured_layers(
    workload: BubblesWorkload, times: Mapping[str, tuple[Timing, Timing]]
) -> BubblesWorkload:
    """The workload with measured times of its layers, for towers whose sizes it states itself.

    Args:
        workload: to be planned.
        times: from `layer_times`.
    """

    def measured(name: str, dims: Any) -> Any:
        if dims is None:
            return None
        forward, backward = times[name]
        return dims.model_copy(
            update={"layer_forward_s": forward.median_s, "layer_backward_s": backward.median_s}
        )

    return workload.model_copy(
        update={
            "backbone": measured("backbone", workload.backbone),
            "encoders": tuple(
                encoder.model_copy(update={"dims": measured(encoder.name, encoder.dims)})
                for encoder in workload.encoders
            ),
        }
    )


def _layer(
    part: BackbonePart | EncoderPart, cut: Cut, shape: tuple[int, ...], device: torch.device,
    dtype: torch.dtype, rounds: int, *, frozen: bool = False,
) -> tuple[Timing, Timing]:  # fmt: skip
    FlatParameters([part], 0, device, dtype, frozen=frozen)
    x = torch.randn(shape, device=device).to(dtype)
    clock = _clock(2 * _REPEATS, device)
    forwards: list[float] = []
    backwards: list[float] = []
    for number in range(-WARMUP, rounds):
        clock.begin()
        for i in range(_REPEATS):
            clock.start(2 * i)
            made = cut.forward(i, [x])
            clock.end(2 * i)
            clock.start(2 * i + 1)
            if not frozen:
                cut.backward(i, made)
            clock.end(2 * i + 1)
        starts, ends = clock.stamps()
        if number >= 0:
            spans = [(end - start) * 1e-9 for start, end in zip(starts, ends, strict=True)]
            forwards += spans[::2]
            backwards += spans[1::2] if not frozen else [0.0] * _REPEATS
    return Timing.of(forwards), Timing.of(backwards)


def _name(action: Action, decision: BubblesDecision) -> str | None:
    if action.op in ("F", "B", "I", "W"):
        return f"{action.stage}{action.op}"
    if action.op in (ENCODE, ENCODE_BACKWARD):
        encoder, _ = decision.encoder_stage(action.stage)
        return f"e{encoder}.{action.step}{'F' if action.op == ENCODE else 'B'}"
    return action.op if action.op == "optimizer" else None


def _clock(places: int, device: torch.device) -> Clock:
    return HostClock(places) if device.type == "cpu" else CudaClock(places, device)


def _device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
