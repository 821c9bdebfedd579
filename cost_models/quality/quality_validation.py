"""Do quality indicators order layers as the model's own predictions do, and do losses add up?

Every indicator is computed on calibration text and compared with the divergence that lowering each
layer alone causes on held-out text: Spearman's correlation over layers, within each number of bits,
because numbers of bits lie orders of magnitude apart and would order themselves. Random mixed plans
then say whether single losses add up, and what they cost in perplexity.

``python -m foreplan.cost_models.quality.quality_validation MODEL -o FILE`` prints the tables of
``docs/results/quality.md``; parts that FILE holds already are not computed again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foreplan.cost_models.quality import quality_indicators as indicators
from foreplan.cost_models.quality.quantised_decoder import QuantisedDecoder
from foreplan.cost_models.quality.sensitivity import weight_sensitivity
from foreplan.datasets.models.byte_text import windows
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.storage import write_atomically
from foreplan.datasets.text_tokens import STANDARD_LIBRARY, Part, text_tokens
from foreplan.errors import ForeplanError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

BITS = (8, 4, 3)
#: Average bits at which the indicators' own plans are compared.
AVERAGES = (3.5, 4.5, 6.0, 8.0)


class Study:
    """Indicators of one model against what is measured on held-out text.

    Args:
        model: a model folder.
        text: see `text_tokens`.
        length: tokens of a window.
        calibration: windows that indicators see.
        held_out: windows that judge.
        device: torch device.
    """

    def __init__(
        self, model: str, text: str = STANDARD_LIBRARY, *, length: int = 256,
        calibration: int = 16, held_out: int = 32, device: str = "cpu",
    ) -> None:  # fmt: skip
        self.decoder = QuantisedDecoder(load_model(model), device)
        self._text, self._length = text, min(length, self.decoder.model.max_sequence - 1)
        self._count: dict[Part, int] = {"calibration": calibration, "held_out": held_out}

    def ids(self, part: Part, seed: int) -> IntArray:
        """Windows ``[count, length + 1]`` of a part."""
        tokens = text_tokens(self.decoder.model, self._text, part)
        return windows(tokens, self._count[part], self._length + 1, (seed,))

    def judge(self) -> FloatArray:
        """Measured divergence on held-out text, ``[layers, BITS]``."""
        return indicators.measured_kl(self.decoder, self.ids("held_out", 0)[:, :-1], BITS)

    def indicators(self, seed: int) -> dict[str, Callable[[], FloatArray]]:
        """Every indicator on the seed's calibration windows, by name."""
        decoder, ids = self.decoder, self.ids("calibration", seed)
        seen, layers = ids[:, :-1], decoder.model.layers
        return {
            "measured_kl": lambda: indicators.measured_kl(decoder, seen, BITS),
            "fisher": lambda: indicators.fisher(decoder, seen, BITS, seed=seed),
            "output_error": lambda: indicators.output_error(decoder, seen, BITS),
            "variance_bound": lambda: indicators.variance_bound(decoder, seen, BITS),
            "hessian": lambda: indicators.hessian(decoder, ids, BITS, seed=seed),
            "weights": lambda: weight_sensitivity(decoder.model, BITS),
            "depth": lambda: indicators.depth(layers, BITS),
            "random": lambda: indicators.random_order(layers, BITS, seed),
        }

    def mixed(self, count: int, seed: int) -> list[dict[str, Any]]:
        """KL and cross-entropy of random mixed plans on held-out text; the first is at 16 bits."""
        layers = self.decoder.model.layers
        plans = [(16,) * layers, *indicators.random_plans(layers, BITS, count, seed)]
        found = indicators.plan_quality(self.decoder, self.ids("held_out", 0), plans)
        return [
            {"bits": list(plan), "kl": kl, "nats": nats}
            for plan, (kl, nats) in zip(plans, found, strict=True)
        ]

    def chosen(self, omegas: dict[str, FloatArray]) -> dict[str, dict[str, tuple[float, float]]]:
        """(KL, cross-entropy) of each indicator's best plan, by average bits; held-out text."""
        layers = self.decoder.model.layers
        plans = {
            (f"{average:g}", name): least_loss_plan(omega, math.floor(average * layers))
            for average in AVERAGES
            for name, omega in omegas.items()
        }
        ids = self.ids("held_out", 0)
        found = indicators.plan_quality(self.decoder, ids, list(plans.values()))
        result: dict[str, dict[str, tuple[float, float]]] = {}
        for (average, name), figures in zip(plans, found, strict=True):
            result.setdefault(average, {})[name] = figures
        return result


def least_loss_plan(omega: FloatArray, total: int) -> tuple[int, ...]:
    """Bits of every layer, 16 or of `BITS`, with the least sum of losses within ``total`` bits.

    Args:
        omega: ``[layers, BITS]``.
        total: most bits over all layers; enough for the fewest.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for row in omega:
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for used, (loss, plan) in best.items():
            for count, more in zip((16, *BITS), (0.0, *row), strict=True):
                key, made = used + count, (loss + float(more), (*plan, count))
                if key <= total and (key not in longer or made < longer[key]):
                    longer[key] = made
        best = longer
    return min(best.values())[1]


def spearman_by_bits(indicator: FloatArray, measured: FloatArray) -> list[float]:
    """Spearman's correlation over layers for each column."""
    from scipy.stats import spearmanr  # type: ignore[import-untyped]

    columns = zip(indicator.T, measured.T, strict=True)
    return [float(spearmanr(ours, theirs).statistic) for ours, theirs in columns]


def additivity(plans: Sequence[dict[str, Any]], omega: FloatArray) -> dict[str, float]:
    """How well sums of single losses stand for the loss of whole plans.

    Args:
        plans: from `Study.mixed`.
        omega: ``[layers, BITS]``, nats a token.

    Returns:
        R2 of ``kl = sum`` (no free parameter), in nats and in logarithms; the median of
        ``|sum / kl - 1|`` and Spearman's correlation.
    """
    from scipy.stats import spearmanr

    lowered = [p for p in plans if p["kl"] > 0]
    sums = np.array([plan_omega(p["bits"], omega) for p in lowered])
    kl = np.array([p["kl"] for p in lowered])

    def r2(x: FloatArray, y: FloatArray) -> float:
        return 1 - float(((y - x) ** 2).sum() / ((y - y.mean()) ** 2).sum())

    return {
        "plans": len(lowered),
        "r2": r2(sums, kl),
        "r2_log": r2(np.log(sums), np.log(kl)),
        "median_error": float(np.median(np.abs(sums / kl - 1))),
        "spearman": float(spearmanr(sums, kl).statistic),
    }


def plan_omega(plan: Sequence[int], omega: FloatArray) -> float:
    """Sum of a plan's single losses."""
    column = {bits: i for i, bits in enumerate(BITS)}
    return float(sum(omega[layer, column[b]] for layer, b in enumerate(plan) if b in column))


def run(study: Study, file: Path, seeds: Sequence[int], plans: int) -> dict[str, Any]:
    """Compute what ``file`` lacks, part by part, and hand back all of it."""
    done: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}

    def part(key: str, make: Callable[[], Any]) -> None:
        if key not in done:
            began = time.process_time()
            made = make()
            done[key] = made.tolist() if isinstance(made, np.ndarray) else made
            done[f"{key} process_s"] = round(time.process_time() - began, 2)
            write_atomically(file, json.dumps(done))
            print(f"{key}: {done[f'{key} process_s']} s", file=sys.stderr, flush=True)

    part("held_out", study.judge)
    for seed in seeds:
        for name, make in study.indicators(seed).items():
            part(f"{name}/{seed}", make)
    part("mixed", lambda: study.mixed(plans, 0))
    first = {n: np.array(done[f"{n}/{seeds[0]}"]) for n in study.indicators(seeds[0])}
    part("chosen", lambda: study.chosen(first))
    return done


def table(done: dict[str, Any], seeds: Sequence[int]) -> str:
    """The results as Markdown."""
    measured = np.array(done["held_out"])
    names = dict.fromkeys(k.rpartition("/")[0] for k in done if k[-1].isdigit() and "/" in k)
    heads = " | ".join(f"{b} bits" for b in BITS)
    lines = [f"| indicator | {heads} | process s |", "|---|" + "---|" * (len(BITS) + 1)]
    for name in names:
        rows = [spearman_by_bits(np.array(done[f"{name}/{s}"]), measured) for s in seeds]
        cells = [f"{min(c):.3f} to {max(c):.3f}" for c in zip(*rows, strict=True)]
        seconds = np.mean([done[f"{name}/{s} process_s"] for s in seeds])
        lines.append(f"| {name} | {' | '.join(cells)} | {seconds:.1f} |")
    heads = "sum of | plans | R2 | R2 of logs | median error | Spearman"
    lines += ["", f"| {heads} |", "|" + "---|" * 6]
    kinds = {"held-out KL": "held_out"} | {n: f"{n}/{seeds[0]}" for n in ("measured_kl", "fisher")}
    for name, key in kinds.items():
        found = additivity(done["mixed"], np.array(done[key]))
        lines.append(
            f"| {name} | {found['plans']} | {found['r2']:.3f} | {found['r2_log']:.3f} | "
            f"{found['median_error']:.1%} | {found['spearman']:.3f} |"
        )
    chosen = done["chosen"]
    nats = done["mixed"][0]["nats"]
    lines += ["", f"| plan by | {' | '.join(f'{a} bits' for a in chosen)} |"]
    lines.append("|---|" + "---|" * len(chosen))
    for name in next(iter(chosen.values())):
        cells = [
            f"{kl:.2e}, {math.expm1(loss - nats):+.3%}"
            for kl, loss in (chosen[average][name] for average in chosen)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """The command; see the module."""
    parser = argparse.ArgumentParser(
        prog="python -m foreplan.cost_models.quality.quality_validation"
    )
    parser.add_argument("model")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--text", default=STANDARD_LIBRARY)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--plans", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    for name, default in (("length", 256), ("calibration", 16), ("held-out", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args(arguments)
    try:
        study = Study(
            given.model, given.text, length=given.length, calibration=given.calibration,
            held_out=given.held_out, device=given.device,
        )  # fmt: skip
        print(table(run(study, given.output, given.seeds, given.plans), given.seeds))
    except ForeplanError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
