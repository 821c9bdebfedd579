"""Networks of the zoo, predicted for one core of this host unprofiled, then run there.

``OMP_NUM_THREADS=1 taskset -c 1 python tests/benchmarks/named_networks.py [NAME[@BATCH] ...]``
reads the processor's figures anew for each network, times 15 passes (``--training``: steps by a
fused AdamW) and prints both, in milliseconds. Passes are timed by the processor's own time: waits
for a core that others use do not count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import foreplan
from foreplan.datasets.graphs.transformers_network import (
    TransformersNetwork,
    network_module,
    network_or_model,
)
from foreplan.datasets.models.network_zoo import zoo_networks

NAMES = ("resnet-18", "resnet-50@4", "mobilenet-v2", "vit-small", "convnext-tiny", "bert-base",
         "t5-small", "whisper-tiny")  # fmt: skip
TOKENS, BEFORE, TIMES = 128, 3, 15


def prepared(name: str, batch: int, *, training: bool) -> Callable[[], object]:
    """One pass, or a step, of a network with random weights and inputs."""
    entry, network = zoo_networks()[name], network_or_model(name)
    assert isinstance(network, TransformersNetwork)
    shapes = network_module(network, batch=batch, tokens=TOKENS)[1]
    config = transformers.AutoConfig.for_model(entry.model_type, **entry.config)
    module: Any = getattr(transformers, entry.class_)(config).train(training)
    given = {
        key: value
        if not isinstance(value, torch.Tensor)
        else torch.randn(value.shape)
        if value.is_floating_point()
        else torch.randint(1, 1000, value.shape)
        for key, value in shapes.items()
    }
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)

    def step() -> None:
        with torch.set_grad_enabled(training):
            result = module(**given)[0]
        if training:
            result.float().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def main() -> None:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--training", action="store_true")
    chosen = parser.parse_args()
    errors = []
    for word in chosen.names:
        name, _, count = word.partition("@")
        batch = int(count or 1)
        found = foreplan.predict_latency(
            name, "cpu:threads=1", batch=batch, phase="training" if chosen.training else "inference"
        )
        step, seconds = prepared(name, batch, training=chosen.training), []
        for turn in range(BEFORE + TIMES):
            start = time.process_time()
            step()
            seconds.append((time.process_time() - start) if turn >= BEFORE else 0.0)
        real = statistics.median(seconds[BEFORE:])
        errors.append(found.latency_s / real - 1)
        print(
            f"{word:16} predicted {found.latency_s * 1e3:8.1f} "
            f"({found.low_s * 1e3:.1f} to {found.high_s * 1e3:.1f}), measured {real * 1e3:8.1f} "
            f"({min(seconds[BEFORE:]) * 1e3:.1f} to {max(seconds) * 1e3:.1f}), {errors[-1]:+.1%}",
            flush=True,
        )
    print(f"mean of |error|: {statistics.mean(map(abs, errors)):.1%}")


if __name__ == "__main__":
    main()
