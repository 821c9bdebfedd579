"""Real latency of networks' passes, and prices of this machine's host: wall clock, end to end."""

from __future__ import annotations

import contextlib
import copy
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.lowering.graph_step import PHASES, Phase
from foreplan.cost_models.passes.call_times import first_line, no_collection, time_calls
from foreplan.cost_models.passes.end_to_end_networks import build, example, shapes_of
from foreplan.cost_models.passes.host_prices import (
    MODES,
    VIEW,
    HostPrices,
    Issue,
    Mode,
    calibrate,
    fit_host,
    python_lines,
)
from foreplan.errors import SpecError

if TYPE_CHECKING:
    import torch

    from foreplan.datasets.graphs.operator_graph import OperatorGraph


#: One pass: functions that run one after the other.
Run = Sequence[Callable[[], object]]


def real_seconds(runs: Sequence[Run], device: str, seconds: float) -> list[tuple[float, ...]]:
    """10th percentile, median and 90th of each pass, start to synchronised end.

    The passes take turns in a round, so that what disturbs the machine for a second does not hit
    one of them alone. The collector of Python's garbage is off meanwhile.

    Args:
        runs: passes, run before.
        device: that they run on.
        seconds: spent on each.
    """
    found = []
    with no_collection():
        for run in runs:
            times = [sum(parts) for parts in _wall([partial(_whole, run)], device, seconds)]
            found.append(tuple(float(q) for q in np.quantile(times, [0.1, 0.5, 0.9])))
    return found


def single_seconds(runs: Sequence[Run], device: str, count: int = 8) -> list[float]:
    """Median seconds of each pass when the device rests before it for twice as long as it takes.

    The host waits awake: one that sleeps for 10 ms needs 80-170 us to launch a graph of one kernel
    and see its end, awake 13-16 (an H200's host, 2026-11-23), and has nothing to do with the pass.
    """
    found = []
    with no_collection():
        for run in runs:
            times = [0.0]
            for _ in range(count):
                resumed = time.perf_counter() + 2.0 * times[-1]
                while time.perf_counter() < resumed:
                    pass
                times += [sum(parts) for parts in _wall([partial(_whole, run)], device, 0.0, 1)]
            found.append(float(np.median(times[1:])))
    return found


def _whole(run: Run) -> None:
    for part in run:
        part()


def of_phases(module: torch.nn.Module) -> dict[Phase, torch.nn.Module]:
    """A network in the mode that each phase runs in; both have the same parameters.

    Passes of both take turns, and changing the mode of all parts takes longer than small ones do.
    """
    shared = {id(parameter): parameter for parameter in module.parameters()}
    return {"inference": module.eval(), "training": copy.deepcopy(module, shared).train()}


def captured(
    module: torch.nn.Module, inputs: Any, name: str, *, training: bool = False
) -> tuple[OperatorGraph, bool]:
    """The operators of a pass, and whether strides are those that a run left.

    Args:
        module: the network.
        inputs: by name.
        name: of it.
        training: as of `capture`.
    """
    from foreplan.datasets.graphs.capture import capture

    asked = partial(capture, module, inputs, name=name, eager=True, training=training)
    try:
        return asked(observe=True), True
    except SpecError as error:
        print(f"{name}: layouts as traced, because a run was not observed: {error}"[:300],
              file=sys.stderr)  # fmt: skip
        return asked(), False


def passes(
    module: torch.nn.Module, inputs: Mapping[str, Any], phase: Phase, *, capturable: bool = False
) -> Run:
    """A pass of a network as functions to be called in order; its update may be for recording."""
    if phase == "inference":
        return _inference(module, inputs)
    return _training(module, inputs, capturable)


def recorded_seconds(
    modules: Mapping[Phase, torch.nn.Module],
    cases: Sequence[tuple[Mapping[str, Any], Phase]],
    device: str,
    seconds: float,
    rounds: int,
) -> list[dict[str, Any]]:
    """Times of a network's passes as CUDA graphs; no eager pass of it may be alive.

    Args:
        modules: the network, by phase.
        cases: inputs and phase of each pass.
        device: ``cuda:N``.
        seconds: spent on each pass.
        rounds: in which the passes take turns.

    Returns:
        Of each pass its times as of an eager one (``real_s``, ``real_low_s``, ``real_high_s``,
        ``rounds_s``), ``rested_s`` (`single_seconds`), ``kernels``, and clock and power while it
        runs (``clock_hz``, ``power_w``; ``None`` where the machine does not tell); or ``failed``,
        why it could not be recorded.
    """
    from foreplan.cost_models.passes.recorded_pass import RecordedPass
    from foreplan.datasets.graphs.capture import attention_of_eager

    found: list[dict[str, Any]] = [{} for _ in cases]
    recorded: dict[int, RecordedPass] = {}
    # What fails to be recorded can disturb what comes after it: those that seldom fail come first.
    for index in sorted(range(len(cases)), key=lambda at: PHASES.index(cases[at][1])):
        inputs, phase = cases[index]
        try:
            with attention_of_eager(modules[phase]):
                run = passes(modules[phase], inputs, phase, capturable=True)
                recorded[index] = RecordedPass.of(run, device)
        except RuntimeError as error:
            found[index] = {"failed": first_line(error)}
            print(f"{phase} was not recorded: {found[index]['failed']}", file=sys.stderr)
    runs = {index: [made.graph.replay] for index, made in recorded.items()}
    times = [
        dict(zip(runs, real_seconds(list(runs.values()), device, seconds / rounds), strict=True))
        for _ in range(rounds)
    ]
    for index, made in recorded.items():
        low, median, high = (float(np.median([part[index][q] for part in times])) for q in range(3))
        clock_hz, power_w = _clock_and_power(made.graph.replay, median, device)
        (rested,) = single_seconds([runs[index]], device, 4)
        found[index] = {
            "real_s": median, "real_low_s": low, "real_high_s": high,
            "rounds_s": [part[index][1] for part in times], "rested_s": rested,
            "kernels": made.kernels, "clock_hz": clock_hz, "power_w": power_w,
        }  # fmt: skip
    return found


class Calibration(NamedTuple):
    """A small network that prices of the host are fitted to.

    Attributes:
        name: of `end_to_end_networks`.
        issue: what it asks of the host.
        whole: seconds of its parts by mode, a part's device idle at its start.
        device: seconds of its calls, each timed alone, by mode; on a CPU with what they take to be
            issued.
        host: seconds of the host to issue the calls, each timed alone, by mode.
    """

    name: str
    issue: Issue
    whole: Mapping[Mode, float]
    device: Mapping[Mode, float]
    host: Mapping[Mode, float]


def measured_host(
    device: str, dtype: Any, networks: Iterable[str], *, lines: bool = True
) -> HostPrices:
    """Prices of this machine's host, fitted to small networks; 20 s on a GPU.

    Args:
        device: torch device.
        dtype: of weights and activations.
        networks: of `end_to_end_networks`.
        lines: whether lines of Python have a price of their own, for a pass that can be run to
            count them; else the factor holds them.

    On a CPU the host is the device: an operator's own price holds its dispatch already, and what is
    left to the host are views and Python.
    """
    alone = None if device.startswith("cuda") else "small"
    seen = list(calibrations(device, dtype, networks, alone=alone))
    if not lines:
        seen = [part._replace(issue=part.issue._replace(lines=0)) for part in seen]
    return fitted_host(device, dtype, seen)


def fitted_host(device: str, dtype: Any, seen: Sequence[Calibration]) -> HostPrices:
    """Prices by kind of call, fitted to networks that were run."""
    from foreplan.cost_models.passes.host_calls import measured_calls, measured_update

    with no_collection():
        calls = measured_calls(device, dtype)
        update = measured_update(device, dtype)
    one, nothing = dict.fromkeys(MODES, 1.0), dict.fromkeys(MODES, 0.0)
    if device.startswith("cuda"):
        prices = HostPrices(calls, update, one, nothing)
        return calibrate(prices, [(part.issue, part.whole) for part in seen]) if seen else prices
    prices = HostPrices(
        {kind: calls[VIEW] if kind == VIEW else nothing for kind in calls}, update, one, nothing
    )
    networks = [
        ({mode: prices.sum_s(part.issue, mode) for mode in MODES}, part.issue.lines,
         {mode: part.whole[mode] - part.device[mode] + part.host[mode] for mode in MODES},
         part.whole)
        for part in seen
    ]  # fmt: skip
    factor, line = fit_host(networks) if seen else (one, nothing)
    return HostPrices(prices.call_s, update, factor, line)


def calibrations(
    device: str, dtype: Any, networks: Iterable[str], *, alone: str | None, seconds: float = 0.5
) -> Iterator[Calibration]:
    """Run networks, each pass for so long, and if asked for each of their calls alone.

    Calls lose more of their time in a pass the less of it the caches hold. So networks whose calls
    are asked for have the size of those that are checked. They run at two shapes, which tells a
    line of Python from what calls lose: of passes of one length one number fits as well as the
    other.

    Args:
        device: to run on.
        dtype: of the networks.
        networks: by name.
        alone: size of networks whose calls are timed alone, too; ``None`` for tiny ones without.
        seconds: of each pass.
    """
    for name in networks:
        size = alone or "tiny"
        module = build(name, size).to(device=device, dtype=dtype).eval()
        for shape in shapes_of(name, size)[: 2 if alone else 1]:
            yield _calibration(name, module, size, shape, device, dtype, bool(alone), seconds)


def _calibration(
    name: str, module: torch.nn.Module, size: str, shape: tuple[int, int], device: str, dtype: Any,
    alone: bool, seconds: float,
) -> Calibration:  # fmt: skip
    from foreplan.cost_models.passes.call_steps import call_steps
    from foreplan.datasets.graphs.capture import capture

    inputs = example(name, size, shape, device, dtype)
    graph = capture(module, inputs, eager=True)
    infer, train = passes(module, inputs, "inference"), passes(module, inputs, "training")
    issue = Issue.of(lower(graph), tensors=len(graph.parameters), lines=python_lines(infer[0]))
    with no_collection():
        (inference,) = np.median(_wall(infer, device, seconds), axis=0)
        forward, backward, _ = np.median(_wall(train, device, seconds), axis=0)
    whole = {"inference": inference, "forward": forward, "backward": backward}
    found = {"device": dict.fromkeys(MODES, 0.0), "host": dict.fromkeys(MODES, 0.0)}
    for phase in PHASES if alone else ():
        steps = call_steps(graph.calls, phase, code=device == "cpu")
        times = time_calls(steps, device, seconds / 50)
        for step in steps:
            if step.part == "optimizer":
                continue
            mode = "inference" if phase == "inference" else (
                "backward" if step.part == "backward" else "forward")  # fmt: skip
            alone_s = times[step.key, step.mode]
            on_device, on_host = (alone_s and alone_s.queued) or (0.0, 0.0)
            cpu = not device.startswith("cuda")
            found["device"][mode] += 0.0 if step.view and not cpu else on_device
            # On a CPU the host's part is known of views alone.
            found["host"][mode] += on_host if step.view or not cpu else 0.0
    return Calibration(
        name, issue, {mode: float(whole[mode]) for mode in MODES}, found["device"], found["host"]
    )


def _inference(module: torch.nn.Module, inputs: Mapping[str, Any]) -> Run:
    import torch

    def infer() -> None:
        with torch.inference_mode():
            module(**inputs)

    return [infer]


def _training(module: torch.nn.Module, inputs: Mapping[str, Any], capturable: bool) -> Run:
    """Forward pass with loss, backward pass, update."""
    import torch

    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6, fused=True, capturable=capturable)
    losses: list[Any] = []

    def forward() -> None:
        logits = module(**inputs).logits
        flat = logits.reshape(-1, logits.shape[-1])
        goal = torch.zeros(flat.shape[0], dtype=torch.int64, device=flat.device)
        losses[:] = [torch.nn.functional.cross_entropy(flat, goal)]

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    # No loss outlives its pass: nodes of autograd belong to the stream that they were made on.
    return [forward, lambda: losses.pop().backward(), update]


def _clock_and_power(
    run: Callable[[], object], seconds: float, device: str, least_s: float = 0.06
) -> tuple[float | None, float | None]:
    """Clock in Hz and power in watts while a pass runs back to back."""
    import torch

    clock: float | None = None
    power: float | None = None
    for _ in range(min(2000, round(least_s / seconds) + 1)):
        run()
    with contextlib.suppress(Exception):  # NVML missing, a virtual machine without clocks
        clock = float(torch.cuda.clock_rate(device)) * 1e6
        power = float(torch.cuda.power_draw(device)) / 1e3
    torch.cuda.synchronize()
    return clock, power


def _wall(parts: Run, device: str, seconds: float, least: int = 10) -> list[list[float]]:
    """Times of parts that run one after the other, the device idle between them."""
    import torch

    from foreplan.cost_models.passes.call_timer import clock

    cuda = torch.device(device).type == "cuda"
    wait: Callable[[], object] = torch.cuda.synchronize if cuda else lambda: None
    now = clock(device)
    times: list[list[float]] = []
    begun = time.perf_counter()
    while len(times) < least or time.perf_counter() - begun < seconds:
        row = []
        for part in parts:
            started = now()
            part()
            wait()
            row.append(now() - started)
        times.append(row)
    return times[min(3, least - 1) :]  # the first ones warm up
