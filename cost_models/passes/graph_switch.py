"""`switch_rows`: what calls lose in recorded passes of networks that nothing is checked on.

A call is timed alone behind calls of its own kind. In a pass it stands behind others: its code and
constants are no longer near, what it reads was written by another kernel in another part of the
cache, and the kernel before has to drain. What that costs is seen on whole passes: the time of a
recorded one on the device, less its calls timed alone. Those of a training step lose more: what it
keeps goes to memory that is cold, and gradients are several kernels a call.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from foreplan.cost_models.lowering.graph_step import PHASES, Phase
from foreplan.cost_models.passes.call_times import no_collection, time_calls

if TYPE_CHECKING:
    import torch


class SwitchRow(NamedTuple):
    """A recorded pass and its calls timed alone.

    Attributes:
        network: of `end_to_end_networks`.
        phase: of it.
        calls: of it that are work.
        pass_s: of the device, from replay to replay.
        alone_s: of its calls, each timed alone inside a graph.
    """

    network: str
    phase: Phase
    calls: int
    pass_s: float
    alone_s: float


def switch_rows(
    device: str, dtype: torch.dtype, networks: Iterable[str], *, size: str = "small",
    seconds: float = 0.01,
) -> Iterator[SwitchRow]:  # fmt: skip
    """Recorded passes of networks at the larger shape of a size; what is not recorded is left out.

    Args:
        device: ``cuda:N``.
        dtype: of weights and activations.
        networks: of `end_to_end_networks`.
        size: of it.
        seconds: spent on each call.
    """
    from foreplan.cost_models.passes.call_steps import call_steps
    from foreplan.cost_models.passes.end_to_end_networks import build, example, shapes_of
    from foreplan.datasets.graphs.capture import capture

    for name in networks:
        shape = shapes_of(name, size)[-1]
        module = build(name, size).to(device=device, dtype=dtype).eval()
        inputs = example(name, size, shape, device, dtype)
        graph = capture(module, inputs, name=name, eager=True, observe=True)
        shapes = [list(parameter.shape) for parameter in module.parameters()]
        for phase in PHASES:
            steps = call_steps(graph.calls, phase, shapes)
            known = time_calls(steps, device, seconds, ["graph"])
            alone = [known[step.key, step.mode] for step in steps]
            times = [None if found is None else found.recorded_s for found in alone]
            pass_s = _pass_seconds(module, inputs, phase, device)
            if pass_s is not None and None not in times:
                worked = [float(t) for t in times if t]
                yield SwitchRow(name, phase, len(worked), pass_s, sum(worked))
        del module
        gc.collect()


def switch_seconds(rows: Sequence[SwitchRow], phase: str) -> float | None:
    """Seconds that a call loses in passes of a phase: the median; ``None`` without a pass."""
    lost = [(row.pass_s - row.alone_s) / row.calls for row in rows if row.phase == phase]
    return max(0.0, float(np.median(lost))) if lost else None


def _pass_seconds(module: Any, inputs: Any, phase: Phase, device: str) -> float | None:
    """Seconds of the device for a recorded pass behind itself; ``None`` where it fails."""
    from foreplan.cost_models.passes.end_to_end_passes import passes
    from foreplan.cost_models.passes.recorded_pass import RecordedPass
    from foreplan.datasets.graphs.capture import attention_of_eager
    from foreplan.datasets.timing.graph_timer import median_seconds

    try:
        with attention_of_eager(module):
            made = RecordedPass.of(passes(module, inputs, phase, capturable=True), device)
    except RuntimeError:
        return None
    with no_collection():
        return median_seconds(made.graph.replay, made.graph.replay, most_s=0.1)
