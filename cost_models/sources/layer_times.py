"""Times of whole decoder layers: added up from predicted operators, held against a measured table.

Run as ``python -m foreplan.cost_models.sources.layer_times --data FILE``, FILE in the format
``helix``.

A table of layers (Helix's) is a test of the operator predictor that shares nothing with its
training but devices: the layer is priced as planners price it, program by program
(`layer_programs`), and a predictor's experts on whole layers are never asked, because no program
is a whole layer. The table does not say how long the prompts of a prefill were nor what context a
decode step had; both are arguments, and errors are reported for several.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.costs import CostBook
from foreplan.datasets.importers import read_operators
from foreplan.datasets.models.decoder_programs import layer_programs
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.model import Model
from foreplan.datasets.program import Program, Variant
from foreplan.datasets.sweeps.operator_table import OperatorTable
from foreplan.errors import MissingDataError, told

Floats = NDArray[np.float64]

#: Cached positions of a decode step and tokens of a prompt where nothing is said. Assumed, as in
#: `foreplan.datasets.importers.helix`.
CONTEXT = PROMPT = 512


@dataclass(frozen=True, slots=True)
class LayerRun:
    """What a layer is run on, in a precision that every chip has.

    Attributes:
        context: cached positions of a decode step.
        prompt: tokens of each prompt of a prefill; fewer tokens are one prompt.
        dtype: of weights, activations and cache: ``fp16`` or ``bf16``.
    """

    context: int = CONTEXT
    prompt: int = PROMPT
    dtype: str = "fp16"

    def programs(self, model: Model, phase: str, tokens: int) -> list[tuple[Program, int]]:
        """Programs of one layer's pass over ``tokens`` requests (decode) or prompt tokens."""
        batch, queries, keys = tokens, 1, self.context
        if phase == "prompt":
            queries = keys = min(self.prompt, tokens)
            batch = max(1, round(tokens / queries))
        kernel = {"linear": "torch.linear", "attention": "torch.sdpa"}
        found = layer_programs(
            model, batch, queries, keys, lambda op, _: Variant("bf16", "bf16", kernel[op])
        )
        return [
            (replace(p, variant=Variant(self.dtype, self.dtype, p.variant.kernel)), count)
            for p, count in found
        ]


@dataclass(frozen=True, slots=True)
class LayerErrors:
    """Errors of one device and phase.

    Attributes:
        device: as in the table.
        phase: ``decode`` or ``prompt``.
        tokens: of each row (N,).
        measured_s: (N,).
        predicted_s: (N,).
    """

    device: str
    phase: str
    tokens: Floats
    measured_s: Floats
    predicted_s: Floats

    @property
    def relative(self) -> Floats:
        """Predicted over measured, minus one (N,)."""
        return self.predicted_s / self.measured_s - 1


def layer_errors(
    table: OperatorTable,
    model: Model,
    costs: CostBook,
    devices: Mapping[str, str],
    run: LayerRun | None = None,
) -> list[LayerErrors]:
    """Price every row of a table of whole layers by its operators.

    Args:
        table: rows of kind ``decoder_layer`` on one device each (no tensor parallelism).
        model: whose layers they are.
        costs: prices of programs, by the names that ``devices`` gives.
        devices: name in the table to name for the cost book; other rows are left out.
        run: what the table leaves open.

    Returns:
        One record a device and phase, in the order of ``devices``.

    Raises:
        MissingDataError: the table has no row of this model on one of the devices, or a program
            has no price.
    """
    chosen = run or LayerRun()
    d = table.dims
    fits = (d["hidden"] == model.hidden) & (d["intermediate"] == model.ffn) & (d["shards"] == 1)
    found = []
    for name, asked in devices.items():
        for phase in ("decode", "prompt"):
            rows = fits & (table.device == name) & (table.op == phase)
            if not rows.any():
                raise MissingDataError(
                    f"no {phase} row of a layer of {model.name} on {name}",
                    fix="a table of this model's layers, or another model",
                )
            tokens = d["tokens"][rows]
            predicted = [
                sum(
                    costs.cost(program, asked).mean_s * count
                    for program, count in chosen.programs(model, phase, int(size))
                )
                for size in tokens
            ]
            found.append(
                LayerErrors(name, phase, tokens, table.latency_s[rows], np.array(predicted))
            )
    return found


def summary(errors: Sequence[LayerErrors]) -> dict[str, object]:
    """Mean absolute and signed error of each device and phase, and of all rows, as fractions."""

    def of(relative: Floats) -> dict[str, float]:
        return {
            "mape": float(np.abs(relative).mean()),
            "bias": float(relative.mean()),
            "count": len(relative),
        }

    cells = {f"{e.device}/{e.phase}": of(e.relative) for e in errors}
    return {"cells": cells, "overall": of(np.concatenate([e.relative for e in errors]))}


def main(arguments: Iterable[str] | None = None) -> None:
    """Print `summary` for each context and length of prompts as JSON."""
    parser = argparse.ArgumentParser(description="Errors on whole decoder layers.")
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--model", default="llama-30b")
    parser.add_argument(
        "--devices", nargs="+", default=["t4=t4", "v100=v100_sxm2_16gb", "l4=l4",
                                         "a100=a100_sxm_40gb"],
    )  # fmt: skip
    parser.add_argument("--contexts", nargs="+", type=int, default=[CONTEXT])
    parser.add_argument("--prompts", nargs="+", type=int, default=[PROMPT])
    options = parser.parse_args(None if arguments is None else list(arguments))
    from foreplan.cost_models.roofline import RooflineSource
    from foreplan.cost_models.sources.predicted import PredictedSource
    from foreplan.datasets import device_zoo

    devices = dict(word.split("=", 1) for word in options.devices)
    figures = {name: device_zoo.device(name) for name in devices.values()}
    costs = CostBook([PredictedSource(), RooflineSource(figures)])
    table, model = read_operators(options.data, "helix"), load_model(options.model)
    results = {
        f"context {context}, prompts of {prompt}": summary(
            layer_errors(table, model, costs, devices, LayerRun(context, prompt))
        )
        for context in options.contexts
        for prompt in options.prompts
    }
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    with told():
        main()
