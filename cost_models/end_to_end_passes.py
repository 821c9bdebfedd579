"""Real latency of a network's pass, and the host's time of an ATen call: wall clock, end to end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from foreplan.cost_models.costs import Segment
from foreplan.cost_models.end_to_end_networks import build, example
from foreplan.cost_models.graph_programs import PARTS, Part, Phase, lower, programs
from foreplan.datasets.program import Program

if TYPE_CHECKING:
    import torch


def real_seconds(
    module: torch.nn.Module, inputs: Mapping[str, Any], phase: Phase, seconds: float
) -> tuple[float, float, float]:
    """10th percentile, median and 90th of a pass, start to synchronised end."""
    run = _inference(module, inputs) if phase == "inference" else _training(module, inputs)
    times = [sum(parts) for parts in _wall([lambda: [part() for part in run]], module, seconds)]
    low, median, high = np.quantile(times, [0.1, 0.5, 0.9])
    return float(low), float(median), float(high)


def _inference(module: torch.nn.Module, inputs: Mapping[str, Any]) -> list[Callable[[], object]]:
    import torch

    def infer() -> None:
        with torch.inference_mode():
            module(**inputs)

    return [infer]


def _training(module: torch.nn.Module, inputs: Mapping[str, Any]) -> list[Callable[[], object]]:
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


def _wall(
    parts: list[Callable[[], object]], module: torch.nn.Module, seconds: float
) -> list[list[float]]:
    """Times of parts that run one after the other, the device idle between them."""
    import torch

    from foreplan.cost_models.program_timer import clock

    device = next(module.parameters()).device
    wait: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    now = clock(str(device))
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


def host_seconds(device: str, dtype: Any) -> dict[str, dict[str, float]]:
    """Host time of one ATen call of an eager network by phase and part.

    A narrow GPT-NeoX of one token runs, whose kernels are shorter than their launch. On a CPU the
    time its operators take by themselves is taken off, because their prices hold it already.
    """
    from foreplan.cost_models.program_timer import ProgramTimer
    from foreplan.datasets.capture import capture

    module = build("gpt_neox", "tiny").to(device=device, dtype=dtype).eval()
    inputs = example("gpt_neox", "tiny", (1, 1), device, dtype)
    graph = capture(module, inputs, eager=True)
    steps = lower(graph, "training")
    alone = dict.fromkeys(PARTS, 0.0)
    if not device.startswith("cuda"):
        timer = ProgramTimer(device, seconds=0.02)
        known = {program: timer.time(program).device_s for program in programs(steps)}
        for step in steps:
            ((work, count),) = step.work.parts if isinstance(step.work, Segment) else (
                (step.work, 1),
            )  # fmt: skip
            assert isinstance(work, Program)
            alone[step.part] += count * known[work]
    calls = {part: sum(step.calls for step in steps if step.part == part) for part in PARTS}

    def rate(seconds: float, *parts: Part) -> float:
        own = sum(alone[part] for part in parts)
        return max(0.0, seconds - own) / sum(calls[part] for part in parts)

    (inference,) = np.median(_wall(_inference(module, inputs), module, 0.5), axis=0)
    forward, backward, update = np.median(_wall(_training(module, inputs), module, 1.0), axis=0)
    return {
        "inference": dict.fromkeys(PARTS, rate(inference, "forward")),
        "training": {
            "forward": rate(forward, "forward", "loss"), "loss": rate(forward, "forward", "loss"),
            "backward": rate(backward, "backward"), "optimizer": rate(update, "optimizer"),
        },
    }  # fmt: skip
