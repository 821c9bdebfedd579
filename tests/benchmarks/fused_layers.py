"""Torch's own transformer layers, timed and priced: ``python fused_layers.py DOCUMENT``.

Inference runs them by one call a layer (``torch.backends.mha``). Real passes on this core with that
and without it take turns; each is the median, in seconds of the thread. Prices are the shipped
ones, of the pass as it runs and of the same pass without that call. DOCUMENT is one of the
end-to-end check, ``datasets/measured/epyc_networks_quiet_small.json.gz``: for the figures.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foreplan.cost_models.replay import predict_latency
from foreplan.datasets.device import Device
from foreplan.datasets.specs import load_document, validate


class Attending(nn.Module):
    """Attention of tokens to themselves."""

    def __init__(self, width: int, heads: int, *, weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.weights = weights

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.attention(src, src, src, need_weights=self.weights)[0]
        return found


def modules() -> Iterator[tuple[str, nn.Module, dict[str, torch.Tensor]]]:
    """Modules and their inputs."""
    for width, heads, inner, layers, activation, norm_first, batch, tokens in (
        (256, 4, 1024, 4, "relu", True, 2, 64), (128, 4, 512, 4, "gelu", False, 1, 32),
        (512, 8, 2048, 2, "gelu", True, 4, 128), (256, 4, 1024, 2, "relu", False, 1, 512),
        (768, 12, 3072, 2, "gelu", False, 1, 128), (64, 2, 128, 6, "relu", False, 8, 16),
        (252, 42, 1024, 2, "relu", False, 2, 128),
    ):  # fmt: skip
        layer = nn.TransformerEncoderLayer(
            width, heads, inner, activation=activation, batch_first=True, norm_first=norm_first
        )
        encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        given = {"src": torch.randn(batch, tokens, width)}
        yield f"{layers} layers of {width}, {heads} heads, {batch} x {tokens}", encoder, given
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    padding = torch.zeros(2, 128, dtype=torch.bool)
    padding[:, 96:] = True
    given = {"src": torch.randn(2, 128, 256), "src_key_padding_mask": padding}
    yield (
        "2 layers under padding, 2 x 128",
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        given,
    )
    for width, heads, batch, tokens, weights in (
        (256, 4, 2, 128, True), (256, 4, 2, 128, False), (512, 8, 1, 256, True),
        (512, 8, 1, 256, False),
    ):  # fmt: skip
        said = f"attention of {width}{' and its weights' * weights}, {batch} x {tokens}"
        yield (
            said,
            Attending(width, heads, weights=weights),
            {"src": torch.randn(batch, tokens, width)},
        )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("document", type=Path)
    parser.add_argument("--turns", type=int, default=40)
    asked = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    device = validate(Device, load_document(asked.document)["figures"], "figures")
    print("| module | ms | without, ms | predicted | as without |\n|---|---|---|---|---|")
    errors: dict[bool, list[float]] = {True: [], False: []}
    plain: list[float] = []
    for name, made, given in modules():
        module, times = made.eval(), dict[bool, list[float]]({True: [], False: []})
        for _ in range(asked.turns):
            for fused, row in times.items():
                torch.backends.mha.set_fastpath_enabled(fused)
                row.append(_timed(module, given))
        real = {fused: statistics.median(row[3:]) for fused, row in times.items()}
        off = {}
        for fused in times:
            torch.backends.mha.set_fastpath_enabled(fused)
            found = predict_latency(module, device, inputs=given).latency_s
            off[fused] = 100 * (found / real[True] - 1)
            errors[fused].append(abs(off[fused]))
        plain.append(100 * ((1 + off[False] / 100) * real[True] / real[False] - 1))
        torch.backends.mha.set_fastpath_enabled(True)
        print(f"| {name} | {1e3 * real[True]:.2f} | {1e3 * real[False]:.2f} "
              f"| {off[True]:+.0f} | {off[False]:+.0f} |", flush=True)  # fmt: skip
    mean = {fused: statistics.mean(row) for fused, row in errors.items()}
    print(f"mean of |error|, %: {mean[True]:.1f}, as without {mean[False]:.1f}; passes without it "
          f"against their own prices: {statistics.mean(map(abs, plain)):.1f}")  # fmt: skip


def _timed(module: nn.Module, given: dict[str, Any]) -> float:
    with torch.no_grad():
        begun = time.thread_time()
        module(**given)
        return time.thread_time() - begun


if __name__ == "__main__":
    main()
