"""Layers without a sweep, priced and timed: ``python composed_modules.py DOCUMENT``.

Recurrent layers, Fourier transforms, distances, bilinear forms and a few other kernels on one core,
of sizes that no price was chosen on. DOCUMENT is one of the end-to-end check, measured on this
machine (``datasets/measured/epyc_networks_small.json.gz``), for the device's figures; prices are
the shipped ones. Modules take turns; each is the median of some passes, in seconds of the thread.
A training step is a forward pass, the sum of the result, its gradients and a fused AdamW update.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from foreplan.cost_models.replay import predict_latency
from foreplan.datasets.device import Device
from foreplan.datasets.specs import load_document, validate

#: Seconds that a module takes a turn.
TURN_S = 0.02


class Plain(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: torch.Tensor) -> Any:
        return self.function(*given)


def spectrogram(x: torch.Tensor) -> torch.Tensor:
    """Sizes of the short-time transform."""
    window = torch.hann_window(512)
    return torch.stft(x, 512, 128, window=window, return_complex=True).abs()


def modules() -> dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    """Modules and their inputs."""
    rand = torch.rand
    return {
        "LSTM 96-192, 48 x 6": (nn.LSTM(96, 192), (rand(48, 6, 96),)),
        "LSTM 320, 2 layers, 24 x 12": (nn.LSTM(320, 320, 2), (rand(24, 12, 320),)),
        "LSTM 64-96, both directions, 80 x 2": (
            nn.LSTM(64, 96, bidirectional=True), (rand(80, 2, 64),),
        ),
        "LSTM 160-320 to 96, 32 x 10": (nn.LSTM(160, 320, proj_size=96), (rand(32, 10, 160),)),
        "GRU 160, 40 x 10": (nn.GRU(160, 160), (rand(40, 10, 160),)),
        "GRU 48-80, 2 layers, both, 60 x 1": (
            nn.GRU(48, 80, 2, bidirectional=True), (rand(60, 1, 48),),
        ),
        "RNN 224, 30 x 20": (nn.RNN(224, 224), (rand(30, 20, 224),)),
        "bilinear 40 x 72 to 30, 128 rows": (
            nn.Bilinear(40, 72, 30), (rand(128, 40), rand(128, 72)),
        ),
        "rfft 40 x 2,048": (Plain(torch.fft.rfft), (rand(40, 2048),)),
        "fft 30 x 5,000, complex": (
            Plain(torch.fft.fft), (torch.complex(rand(30, 5000), rand(30, 5000)),),
        ),
        "rfft2 6 x 192 x 192": (Plain(torch.fft.rfft2), (rand(6, 192, 192),)),
        "stft 8 x 12,000 and sizes": (Plain(spectrogram), (rand(8, 12000),)),
        "distances 700 x 300 x 48": (Plain(torch.cdist), (rand(700, 48), rand(300, 48))),
        "distances 150 x 220 x 40, p = 1": (
            Plain(lambda a, b: torch.cdist(a, b, p=1.0)), (rand(150, 40), rand(220, 40)),
        ),
        "sort 40 x 500": (Plain(lambda x: torch.sort(x)[0]), (rand(40, 500),)),
        "bicubic 2 x 16 x 40 x 40 by 1.5": (
            Plain(lambda x: F.interpolate(x, scale_factor=1.5, mode="bicubic")),
            (rand(2, 16, 40, 40),),
        ),
    }  # fmt: skip


def one_pass(module: nn.Module, given: tuple[torch.Tensor, ...], phase: str) -> Callable[[], None]:
    """A pass of a phase."""
    if phase == "inference":

        def infer() -> None:
            with torch.no_grad():
                module(*given)

        return infer
    update = torch.optim.AdamW(module.parameters(), fused=True)

    def train() -> None:
        update.zero_grad(set_to_none=True)
        out = module(*given)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
        update.step()

    return train


def turn_s(run: Callable[[], None]) -> float:
    """Median seconds of the thread of some passes."""

    def once() -> float:
        start = time.thread_time()
        run()
        return time.thread_time() - start

    count = max(3, min(30, int(TURN_S / max(1e-6, once()))))
    return statistics.median(once() for _ in range(count))


def main() -> None:
    """Print predicted over measured for each module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("document", type=Path)
    parser.add_argument("--turns", type=int, default=9)
    asked = parser.parse_args()
    device = validate(Device, load_document(asked.document)["figures"], "figures")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", "LSTM with projections", UserWarning)
    cases = [
        (name, module.eval(), given, phase, one_pass(module, given, phase))
        for name, (module, given) in modules().items()
        for phase in ("inference", "training")[: 1 + any(True for _ in module.parameters())]
    ]
    times: list[list[float]] = [[] for _ in cases]
    for _ in range(asked.turns):
        for (*_, run), found in zip(cases, times, strict=True):
            found.append(turn_s(run))
    off = []
    for (name, module, given, phase, _), found in zip(cases, times, strict=True):
        measured = statistics.median(found)
        predicted = predict_latency(module, device, inputs=given, phase=phase)  # type: ignore[arg-type]
        off.append(abs(math.log(predicted.latency_s / measured)))
        listed = [row["operator"] for row in predicted.unsupported()]
        print(
            f"{name:36} {phase:9} {1e3 * measured:8.3f} ms (+-{_spread(found):3.0f} %)  predicted "
            f"{1e3 * predicted.latency_s:8.3f}, x{predicted.latency_s / measured:5.2f}  {listed}"
        )
    within = sum(value <= math.log(1.5) for value in off)
    middle, worst = math.exp(statistics.mean(off)), math.exp(max(off))
    sys.stdout.write(
        f"{within} of {len(off)} within a factor of 1.5; in the mean a factor of {middle:.2f}, at "
        f"worst of {worst:.2f}\n"
    )


def _spread(found: list[float]) -> float:
    """Half of the range between quartiles of turns, in percent of their median."""
    low, middle, high = statistics.quantiles(found, n=4)
    return 50 * (high - low) / middle


if __name__ == "__main__":
    main()
