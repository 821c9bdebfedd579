"""Real latency of networks' passes, and prices of this machine's host: wall clock, end to end."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from foreplan.cost_models.costs import Segment
from foreplan.cost_models.end_to_end_networks import build, example
from foreplan.cost_models.graph_programs import PARTS, Phase, lower, programs
from foreplan.cost_models.host_prices import (
    MODES,
    VIEW,
    HostPrices,
    Issue,
    Mode,
    calibrate,
    python_lines,
)
from foreplan.datasets.program import Program

if TYPE_CHECKING:
    import torch

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
    with _no_collection():
        for run in runs:
            times = [sum(parts) for parts in _wall([partial(_whole, run)], device, seconds)]
            found.append(tuple(float(q) for q in np.quantile(times, [0.1, 0.5, 0.9])))
    return found


def _whole(run: Run) -> None:
    for part in run:
        part()


def passes(module: torch.nn.Module, inputs: Mapping[str, Any], phase: Phase) -> Run:
    """A pass of a network as functions to be called in order."""
    return _inference(module, inputs) if phase == "inference" else _training(module, inputs)


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
    from foreplan.cost_models.host_calls import measured_calls, measured_update
    from foreplan.datasets.capture import capture

    with _no_collection():
        calls = measured_calls(device, dtype)
        update = measured_update(device, dtype)
    cpu = not device.startswith("cuda")
    if cpu:
        calls = {kind: calls[VIEW] if kind == VIEW else dict.fromkeys(MODES, 0.0) for kind in calls}
    one = dict.fromkeys(MODES, 1.0)
    prices = HostPrices(calls, update, one, dict.fromkeys(MODES, 0.0))
    seen: list[tuple[Issue, dict[Mode, float]]] = []
    for name in networks:
        module = build(name, "tiny").to(device=device, dtype=dtype).eval()
        inputs = example(name, "tiny", None, device, dtype)
        graph = capture(module, inputs, eager=True)
        infer, train = passes(module, inputs, "inference"), passes(module, inputs, "training")
        issue = Issue.of(
            lower(graph), tensors=len(graph.parameters), lines=python_lines(infer[0]) * lines
        )
        with _no_collection():
            (inference,) = np.median(_wall(infer, device, 0.5), axis=0)
            forward, backward, _ = np.median(_wall(train, device, 0.5), axis=0)
        alone = _alone(graph, device) if cpu else dict.fromkeys(MODES, 0.0)
        whole = {"inference": inference, "forward": forward, "backward": backward}
        # A network that spends its time in operators says little of the host.
        if all(alone[mode] < 0.7 * whole[mode] for mode in MODES):
            seen.append((issue, {mode: float(whole[mode] - alone[mode]) for mode in MODES}))
    return calibrate(prices, seen) if seen else prices


def _alone(graph: Any, device: str) -> dict[Mode, float]:
    """Seconds of the operators of a pass, each timed alone, by mode."""
    from foreplan.cost_models.program_timer import ProgramTimer

    steps = lower(graph, "training")
    timer = ProgramTimer(device, seconds=0.01)
    known = {program: timer.time(program).device_s for program in programs(steps)}
    found = dict.fromkeys(PARTS, 0.0)
    for step in steps:
        ((work, count),) = step.work.parts if isinstance(step.work, Segment) else ((step.work, 1),)
        assert isinstance(work, Program)
        found[step.part] += count * known[work]
    return {
        "inference": found["forward"],
        "forward": found["forward"] + found["loss"],
        "backward": found["backward"],
    }


def _inference(module: torch.nn.Module, inputs: Mapping[str, Any]) -> Run:
    import torch

    def infer() -> None:
        with torch.inference_mode():
            module(**inputs)

    return [infer]


def _training(module: torch.nn.Module, inputs: Mapping[str, Any]) -> Run:
    """Forward pass with loss, backward pass, update."""
    import torch

    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6, fused=True)
    losses: list[Any] = []

    def forward() -> None:
        logits = module(**inputs).logits
        flat = logits.reshape(-1, logits.shape[-1])
        goal = torch.zeros(flat.shape[0], dtype=torch.int64, device=flat.device)
        losses[:] = [torch.nn.functional.cross_entropy(flat, goal)]

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return [forward, lambda: losses[0].backward(), update]


def _wall(parts: Run, device: str, seconds: float) -> list[list[float]]:
    """Times of parts that run one after the other, the device idle between them."""
    import torch

    from foreplan.cost_models.program_timer import clock

    cuda = torch.device(device).type == "cuda"
    wait: Callable[[], object] = torch.cuda.synchronize if cuda else lambda: None
    now = clock(device)
    times: list[list[float]] = []
    begun = time.perf_counter()
    while len(times) < 10 or time.perf_counter() - begun < seconds:
        row = []
        for part in parts:
            started = now()
            part()
            wait()
            row.append(now() - started)
        times.append(row)
    return times[3:]  # the first ones warm up


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Python's garbage stays where it is: a collection takes longer than a pass."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
