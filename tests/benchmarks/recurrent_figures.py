"""Recurrent layers of a GPU, drawn: ``python recurrent_figures.py measure|fit|score FILE``.

``measure`` runs 150 layers of LSTM, GRU and RNN from CUDA graphs (15 s; needs torch alone), ``fit``
prints the constants of `cost_models.sources.recurrent_steps` by every second one and how far off
the others are, ``score`` prints what predictions are of the measured times.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_functions import graph_s
from torch import Tensor, nn

_KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
_GATES = {"lstm": 4, "gru": 3, "rnn": 1}
_SHARED = 227 << 10

Row = dict[str, Any]


def drawn(count: int = 150, seed: int = 7) -> Iterator[Row]:
    """Layers, sizes by their logarithm."""
    of = random.Random(seed)

    def size(low: float, high: float) -> int:
        return round(2 ** of.uniform(low, high))

    for at in range(count):
        yield {
            "kind": tuple(_KINDS)[at % 3], "steps": size(3, 8), "batch": size(0, 7),
            "cin": 8 * size(0, 6.5), "hidden": 8 * size(1, 7), "layers": of.choice([1, 1, 2]),
            "bi": of.choice([False, False, True]), "dtype": of.choice(["float32", "bfloat16"]),
        }  # fmt: skip


def made(row: Mapping[str, Any], device: str) -> tuple[nn.Module, Tensor]:
    """A layer, and what it reads."""
    torch.manual_seed(0)
    dtype = getattr(torch, row["dtype"])
    module = _KINDS[row["kind"]](
        row["cin"], row["hidden"], row["layers"], bidirectional=row["bi"], batch_first=True
    )
    x = torch.randn(row["batch"], row["steps"], row["cin"], device=device)
    return module.to(device).to(dtype), x.to(dtype)


def measure(path: Path) -> None:
    """Write seconds of inference and of the gradients."""
    torch.cuda.set_stream(torch.cuda.Stream())
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    rows = []
    for row in drawn():
        module, x = made(row, "cuda")
        module.eval()
        with torch.no_grad():
            row["inference"] = graph_s([lambda m=module, x=x: m(x)])
        out = module.train()(x.requires_grad_())[0]
        wanted, seed = [x, *module.parameters()], torch.randn_like(out)
        row["backward"] = graph_s(
            [lambda o=out, w=wanted, s=seed: torch.autograd.grad(o, w, s, retain_graph=True)]
        )
        rows.append(row)
        path.write_text(json.dumps(rows))


# ------------------------------------------------------------------------------------ fitting


def fit(path: Path) -> None:
    """Print a step's seconds, bytes a second, a further layer's share, and seconds a layer."""
    from scipy.optimize import minimize

    rows = json.loads(path.read_text())
    for half in (True, False):
        for back in (False, True):
            mine = [r for r in rows if (r["dtype"] == "bfloat16") == half and (half or _stays(r))]
            real = np.array([r["backward" if back else "inference"] for r in mine])
            once = np.array([_once_s(r, back) for r in mine])

            def off(
                logs: Any, of: slice, mine: list[Row] = mine, half: bool = half,
                real: Any = real, once: Any = once,
            ) -> float:  # fmt: skip
                took = once + [_law_s(np.exp(logs), r, half) for r in mine]
                return float(np.abs(np.log(took / real))[of].mean())

            start = np.log([4.2e-6, 1.8e12, 0.35, 1e-5] if half else [3e-7, 2.5e11, 1.0, 2e-5])
            starts = [start + np.random.default_rng(s).normal(0, 0.3, 4) for s in range(4)]
            found = min(
                (minimize(off, s, args=(slice(0, None, 2),), method="Nelder-Mead",
                          options={"maxiter": 3000}) for s in starts), key=lambda m: m.fun,
            )  # fmt: skip
            held_out = math.exp(off(found.x, slice(1, None, 2)))
            of = f"{'16 bits' if half else 'FP32'}, {'backward' if back else 'forward'}"
            others = f"fitted {math.exp(found.fun):.3f}, others {held_out:.3f}"
            print(f"{of}: {np.exp(found.x)}, {others}")


def _bytes(row: Row) -> int:
    return _GATES[row["kind"]] * row["hidden"] ** 2 * (2 if row["dtype"] == "bfloat16" else 4)


def _stays(row: Row) -> bool:
    return _bytes(row) <= _SHARED


def _law_s(values: Any, row: Row, half: bool) -> float:
    step_s, rate, behind, once_s = values
    directions = 1 + row["bi"]
    layers = 1 + (row["layers"] - 1) * (1.0 if row["bi"] else behind)
    if not half:
        step = directions * (step_s + _bytes(row) / rate)
    else:
        step = step_s + directions * _bytes(row) / rate
    return float(row["steps"] * layers * step + once_s * row["layers"])


def _once_s(row: Row, back: bool) -> float:
    from foreplan.cost_models.lowering.recurrent_parts import recurrent_parts
    from foreplan.cost_models.predictor import Predictor
    from foreplan.datasets import device_zoo
    from foreplan.datasets.program import INPUT_GRADIENT, Variant, program

    dtype = "fp32" if row["dtype"] == "float32" else "bf16"
    name = {"lstm": "torch.lstm", "gru": "torch.gru", "rnn": "torch.rnn_tanh"}[row["kind"]]
    item = program(
        "recurrent_gradient" if back else "recurrent",
        Variant(dtype, dtype, name + INPUT_GRADIENT * back), steps=row["steps"],
        rows=row["batch"], inputs=row["cin"], hidden=row["hidden"], outputs=row["hidden"],
        gates=_GATES[row["kind"]], layers=row["layers"], directions=1 + row["bi"],
    )  # fmt: skip
    h200 = device_zoo.device("h200")
    parts = recurrent_parts(item, h200).once
    prices = Predictor.load().predict([part for part, _ in parts], h200)
    return sum(p.mean_s * count for p, (_, count) in zip(prices, parts, strict=True))


# ------------------------------------------------------------------------------------ scoring


class _First(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.module(x)[0]
        return made


def score(path: Path, device: str) -> None:
    """Print how far predictions are off, by dtype and phase."""
    from foreplan import predict_latency

    found: dict[tuple[str, str], list[float]] = {}
    for row in json.loads(path.read_text()):
        module, x = made(row, "cpu")
        for phase, part in (("inference", "forward"), ("training", "backward")):
            replay = predict_latency(
                _First(module), device, inputs=[x], phase=phase, execution="graph"
            )
            took = sum(
                p.mean_s * s.calls for p, s in zip(replay.prices, replay.steps, strict=True)
                if s.part == part
            )  # fmt: skip
            real = row["inference" if part == "forward" else "backward"]
            found.setdefault((row["dtype"], part), []).append(abs(math.log(took / real)))
    for (dtype, part), logs in found.items():
        near = sum(each < math.log(1.5) for each in logs)
        mean = math.exp(sum(logs) / len(logs))
        print(f"{dtype} {part}: {mean:.2f} in the mean, {near} of {len(logs)} within 1.5")


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("way", choices=["measure", "fit", "score"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--device", default="h200", help="of the zoo")
    given = parser.parse_args()
    if given.way == "measure":
        measure(given.path)
    elif given.way == "fit":
        fit(given.path)
    else:
        score(given.path, given.device)


if __name__ == "__main__":
    main()
