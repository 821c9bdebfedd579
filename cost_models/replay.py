"""Replays the steps of a pass on one device: prices, `Schedule`, simulator, end-to-end latency.

On a GPU the host issues one operator after the other and the device runs them in order, so a pass
is two queues: ``host`` holds a `HostLaunch` for each operator, ``compute`` the operator itself,
which waits for its launch and for the operator before it. Where issuing takes longer than running,
the host decides the latency and the device idles. On a CPU the host is the device: launches run in
the compute queue between the operators.

That is ``eager`` execution. With ``graph`` the pass was recorded as a CUDA graph: the host launches
it once, and the device runs operators back to back, each behind a gap that its price does not hold.
``compiled`` is the same of kernels that a compiler fused (`compiled_steps`).

Not modelled: kernels that overlap on a device, a host that must wait because too many launches
are queued, transfers of the result, code compiled for CPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.book import CostChoice, cost_choice
from foreplan.cost_models.costs import Copy, CostBook, CostSource, Estimate, HostLaunch, Work
from foreplan.cost_models.execution import Execution, check_execution, gaps
from foreplan.cost_models.given_seconds import (
    GapSeconds,
    LaunchSeconds,
    check_steps,
    checked_launch,
    checked_seconds,
)
from foreplan.cost_models.lowering.asked_steps import asked_model, asked_steps
from foreplan.cost_models.lowering.graph_programs import (
    programs,
)
from foreplan.cost_models.lowering.graph_step import Phase, Step
from foreplan.cost_models.pass_arguments import (
    check_phase,
    loaded_predictor,
    loaded_profile,
    named_device,
)
from foreplan.cost_models.passes.host_prices import profiled_launches
from foreplan.cost_models.rates.gpu_host import gpu_host_s
from foreplan.cost_models.rates.new_pages import with_new_pages
from foreplan.cost_models.rates.processor_host import processor_host_s
from foreplan.cost_models.rates.reuse import pass_waits
from foreplan.cost_models.replayed_pass import Replay
from foreplan.cost_models.roofline import RooflineSource
from foreplan.cost_models.schedule import COMPUTE, HOST, Schedule
from foreplan.cost_models.schedule_builder import ScheduleBuilder
from foreplan.cost_models.simulator import Simulator
from foreplan.cost_models.sources.composed import ComposedSource
from foreplan.cost_models.sources.device_fit import DeviceFit, FittedSource
from foreplan.cost_models.sources.narrowest import NarrowestSource
from foreplan.cost_models.sources.predicted import PredictedSource
from foreplan.cost_models.sources.tables import InterpolatedSource, MeasuredSource
from foreplan.datasets.device import Device
from foreplan.datasets.graphs.transformers_network import TransformersNetwork
from foreplan.datasets.models.model import Model
from foreplan.datasets.profile import Profile
from foreplan.errors import SpecError

if TYPE_CHECKING:
    import torch

    from foreplan.cost_models.predictor import Predictor

COPY = "copy"

#: Clock cycles of a kernel that does next to nothing; see `operator_features`.
_SHORTEST_CYCLES, _USUAL_CLOCK_HZ = 5400.0, 1.8e9


def replay(
    steps: Sequence[Step],
    book: CostBook,
    device: Device,
    *,
    execution: Execution = "eager",
    launch_s: LaunchSeconds = None,
    gap_s: GapSeconds = None,
    input_bytes: int = 0,
) -> Replay:
    """Simulate one pass.

    Args:
        steps: from `graph_programs`.
        book: prices them; asked for ``device.name``.
        device: a CPU has no host beside it.
        execution: ``eager``, or on a GPU ``graph``, or ``compiled``, of steps lowered for it.
        launch_s: of eager execution, time the host needs for one ATen call, measured or known, of
            every part of a pass or by part, or for all calls of each step (N,), as `HostPrices` has
            them; ``None`` takes a usual host's (`gpu_host_s`), on a CPU `processor_host_s`.
        gap_s: of a graph, seconds before every operator whose price does not hold them (not what a
            profile measured), or before each step (N,); ``None`` takes `execution.GRAPH_GAP_S`.
        input_bytes: copied to the device first.

    Raises:
        SpecError: a graph on a CPU.
        MissingDataError: a step that nothing can price, not even the roofline.
    """
    check_execution(execution, device)
    own_host = device.kind != "cpu"
    schedule = replay_schedule(
        steps, device.name, own_host=own_host, execution=execution,
        input_bytes=input_bytes if own_host else 0,
    )  # fmt: skip
    apart = execution == "eager"
    table = {work: _price(work, book, device.name, apart=apart) for work in schedule.works}
    prices = [table[step.work] for step in steps]
    ends = np.array([[p.mean_s, p.low_s, p.high_s] for p in table.values()]).reshape(-1, 3)
    durations = ends[schedule.work]
    launches, between = (
        np.array([op == name for op in schedule.ops], dtype=bool)[schedule.op]
        for name in ("launch", "gap")
    )
    if apart:
        durations[launches] = _launches(steps, prices, device, launch_s)
        prices = with_new_pages(steps, prices, device)
    if not own_host:
        own = [(p.mean_s, p.low_s, p.high_s) for p in prices]
        durations[~launches] = np.array(own).reshape(-1, 3)
    if between.any():
        durations[between] = np.array(gaps(prices, gap_s)[1:]).reshape(-1, 1)
    simulator = Simulator(schedule)
    low, high = (simulator.run(durations[:, at]).makespan_s for at in (1, 2))
    timeline = simulator.run(durations[:, 0])
    host_s, gaps_s = (float(durations[which, 0].sum()) for which in (launches, between))
    device_s = sum((price.mean_s for price in prices), 0.0)
    return Replay(
        device.name, timeline.makespan_s, low, high, execution, host_s, device_s, gaps_s,
        tuple(steps), tuple(prices), timeline,
    )  # fmt: skip


def replay_schedule(
    steps: Sequence[Step],
    device: str,
    *,
    own_host: bool = True,
    execution: Execution = "eager",
    input_bytes: int = 0,
) -> Schedule:
    """The pass as a schedule of one rank.

    Args:
        steps: what runs, in order.
        device: name of the rank's device.
        own_host: launches have a queue of their own; else they share the compute queue.
        execution: ``graph`` and ``compiled`` have one launch, and gaps between operators.
        input_bytes: copied to the device before the first operator, by the copy engine.
    """
    builder = ScheduleBuilder([device])
    ready: tuple[int, ...] = ()
    if input_bytes:
        copy = Copy(input_bytes, "host_to_device")
        ready = (builder.add("copy", 0, copy, resources=(COPY,)),)
    queue = (HOST,) if own_host else (COMPUTE,)
    graph = execution != "eager"
    for index, step in enumerate(steps):
        waits = ready
        if graph and index:
            builder.add("gap", 0, HostLaunch(0))
        else:
            calls = 1 if graph else step.calls
            launch = builder.add("launch", 0, HostLaunch(calls), resources=queue)
            waits = (*ready, launch) if own_host else ready
        builder.add(step.kind, 0, step.work, dependencies=waits)
        ready = ()
    return builder.build()


def replay_book(
    device: Device,
    costs: CostChoice = "predicted",
    *,
    profile: Profile | None = None,
    predictor: Predictor | None = None,
    fit: DeviceFit | None = None,
    given: Mapping[Work, float] | None = None,
    steps: Sequence[Step] = (),
) -> CostBook:
    """A cost book whose prices are of the device alone, without the launch.

    Args:
        device: its figures; a zoo device's also name what the predictor is asked for.
        costs: ``measured`` needs a profile; ``predicted`` leaves it out, ``roofline`` the predictor
            too.
        profile: what was measured on the device.
        predictor: loaded already; ``None`` loads ``pretrained:ops`` when it is needed.
        fit: predictor fitted to the device; it comes before the shipped one.
        given: seconds that override every source.
        steps: of the pass that it will price, run again and again: what of it a processor's caches
            hold costs less from the shipped rates (`reuse`). Without them nothing is in the caches.

    Raises:
        SpecError: a profile of another chip.
    """
    own = profile.device if profile is not None else device
    if own.name != device.name and (own.kind, own.chip) != (device.kind, device.chip):
        raise SpecError(
            "profile", got=f"one of {own.name} ({own.chip})",
            expected=f"one of {device.name} or of its chip",
            fix="name no other device with a profile",
        )  # fmt: skip
    passes = steps and device.kind == "cpu"
    waits = {device.name: pass_waits(steps, device)} if passes else {}
    sources: list[CostSource] = []
    near: list[CostSource] = []
    if costs == "measured" and profile is not None:
        by_name = {device.name: profile}
        sources.append(MeasuredSource(by_name))
        near.append(InterpolatedSource(by_name))
    if costs != "roofline" and fit is not None:
        near.append(FittedSource({device.name: fit}))
    if near:
        sources.append(NarrowestSource(near))
    if costs != "roofline":
        sources.append(PredictedSource(predictor, devices={device.name: device}, waits=waits))
    sources += [_Launches(device), RooflineSource({device.name: _without_launch(device)})]
    origin = "roofline" if costs == "roofline" else "predicted"
    sources.insert(0, ComposedSource(sources, device, origin))
    return CostBook(sources, given=given)


def predict_latency(
    model: str | Path | Model | TransformersNetwork | torch.nn.Module,
    device: str | Device,
    *,
    inputs: Any = None,
    batch: int | None = None,
    sequence_length: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    dtype: str | None = None,
    phase: Phase = "inference",
    costs: CostChoice = "predicted",
    profile: Profile | str | Path | None = None,
    predictor: Predictor | str | Path | None = None,
    execution: Execution = "eager",
    launch_s: LaunchSeconds = None,
    gap_s: GapSeconds = None,
) -> Replay:
    """Latency of one pass of a model on a device that need not be here.

    Whether the device's memory holds the pass is not asked; `rank_devices` says that of described
    models.

    Args:
        model: zoo name, Hugging Face folder, described model, or any module with ``inputs``.
        device: zoo name, ``cpu`` or ``cpu:threads=1`` for this host's processor, or figures.
        inputs: example inputs of a module: a tensor, a tuple of arguments, a mapping by name, or
            of a tuple and a mapping both; a described model takes sizes instead.
        batch: sequences or images of a described model, 1 if ``None``.
        sequence_length: tokens of each, 128 if ``None``; all are new (prefill).
        image_size: side of its images in pixels, or height and width; its usual ones if ``None``.
        dtype: of weights and activations of a described model, ``fp32``, ``fp16`` or ``bf16``; its
            own if ``None``.
        phase: ``inference``, or ``training``: forward, backward and a fused AdamW update, in
            training mode (dropout, batch norms of the batch's own statistics). A module that is
            in training mode keeps the modes of its parts; see `Replay.evaluated`.
        costs: ``measured`` needs a profile; ``predicted`` leaves it out, ``roofline`` the predictor
            too.
        profile: what was measured on the device, or its file, with which a fit beside it counts,
            as for ``foreplan predict --profile``.
        predictor: from `Predictor.load`, or what that takes; ``None`` loads ``pretrained:ops``
            when it is needed.
        execution: ``eager``, or on GPUs alone ``graph``: replayed from a CUDA graph, or
            ``compiled``: by ``torch.compile``, as a CUDA graph (``mode="reduce-overhead"``).
        launch_s: seconds that the host takes for one ATen call of an eager pass, for all of it or
            by part (``forward``, ``loss``, ``backward``, ``optimizer``), or for all calls of each
            operator (N,), a list, an array or a tensor; ``None`` takes the profile's, if it has
            them, else a usual host's.
        gap_s: seconds between the operators of a graph, or before each (N,); ``None`` takes the
            profile's ``switch_s``, if there is one, else an H200's.

    Raises:
        SpecError: no such model or device, an argument that is none of those named above, a module
            that cannot be captured, or a graph on a CPU.
        MissingDataError: a figure is missing that even the roofline needs.
    """
    target = named_device(device, "predict_latency: device") if isinstance(device, str) else device
    if not isinstance(target, Device):
        raise SpecError(
            "predict_latency: device", got=target, expected="one name of the zoo, or its figures"
        )
    check_execution(execution, target, "predict_latency: execution")
    # From a notebook, as all below: unseen by a type checker.
    check_phase(phase, "predict_latency: phase")
    if cost_choice(costs, "predict_latency: costs") == "measured" and profile is None:
        raise SpecError(
            "predict_latency: costs", got=costs, expected="a profile to take measurements from"
        )
    launches = checked_launch(launch_s, execution, "predict_latency: launch_s")
    between = None if gap_s is None else checked_seconds(gap_s, "predict_latency: gap_s")
    measured, fit = loaded_profile(profile, costs, "predict_latency: profile")
    loaded = loaded_predictor(predictor, costs, "predict_latency: predictor")
    compiled = execution == "compiled"
    asked = asked_model(model, inputs, dtype, image_size, "predict_latency")
    steps = asked_steps(asked, batch, sequence_length, phase, compiled)
    check_steps(launches, steps, "predict_latency: launch_s")
    check_steps(between, steps, "predict_latency: gap_s")
    book = replay_book(target, costs, profile=measured, predictor=loaded, fit=fit, steps=steps)
    if between is None and measured is not None:
        between = measured.switch_s
    host: LaunchSeconds = launches
    if launches is None and execution == "eager":
        host = profiled_launches(measured, steps, phase)
    return replay_steps(steps, book, target, execution=execution, launch_s=host, gap_s=between)


def replay_steps(
    steps: Sequence[Step],
    book: CostBook,
    device: Device,
    *,
    execution: Execution = "eager",
    launch_s: LaunchSeconds = None,
    gap_s: GapSeconds = None,
) -> Replay:
    """`replay`, with all programs predicted at once first, a hundred times cheaper."""
    book.prepare(programs(steps), device.name)
    return replay(steps, book, device, execution=execution, launch_s=launch_s, gap_s=gap_s)


def _launches(
    steps: Sequence[Step], prices: Sequence[Estimate], device: Device, launch_s: LaunchSeconds
) -> NDArray[np.float64]:
    """Seconds of the host before each step: mean, low and high (N, 3), or (N, 1) where alike."""
    if launch_s is None and device.kind != "cpu":
        return gpu_host_s(steps)
    if launch_s is None:
        launch_s = processor_host_s(steps, prices, device)
    if isinstance(launch_s, Mapping):
        launch_s = [step.calls * launch_s[step.part] for step in steps]
    seconds = np.asarray(launch_s, dtype=np.float64)
    if not seconds.ndim:
        seconds = seconds * np.array([step.calls for step in steps])
    return seconds.reshape(-1, 1)


class _Launches:
    """Prices launches at the device's published or assumed overhead."""

    def __init__(self, device: Device) -> None:
        self._source = RooflineSource(device)

    def estimate(self, work: Work, device: str) -> Estimate | None:
        """Price a `HostLaunch`; ``None`` for anything else."""
        return self._source.estimate(work, device) if isinstance(work, HostLaunch) else None


def _without_launch(device: Device) -> Device:
    """Figures for the roofline's programs: a launch is apart, but no kernel takes no time."""
    if device.kind == "cpu":
        return device
    shortest = _SHORTEST_CYCLES / float(device.clock_hz or _USUAL_CLOCK_HZ)
    return device.model_copy(update={"launch_overhead_s": shortest})


def _price(work: Work, book: CostBook, device: str, *, apart: bool) -> Estimate:
    if isinstance(work, HostLaunch) and apart:
        return Estimate.exact(0.0)  # priced step by step
    return book.cost(work, device)
