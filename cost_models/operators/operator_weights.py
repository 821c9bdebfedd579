"""Weights of the operator predictor on disk: ``weights.safetensors`` and ``card.json``.

Thresholds and leaves are kept in half precision where that loses nothing that matters (leaves) and
in single precision where it might (thresholds). The card says what every expert was fitted on, from
which sources, under which licences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.model_store import MISFITS, read_card, read_weights, write_model
from foreplan.cost_models.operators.device_gate import GateScales
from foreplan.cost_models.operators.operator_features import FAMILIES
from foreplan.cost_models.operators.operator_work import PRECISIONS
from foreplan.cost_models.tree_ensemble import TreeEnsemble
from foreplan.datasets.device import Device
from foreplan.datasets.specs import validate
from foreplan.errors import SpecError

if TYPE_CHECKING:
    from foreplan.cost_models.operators.fitted_experts import FittedExperts
    from foreplan.cost_models.operators.operator_experts import Expert
    from foreplan.cost_models.operators.operator_predictor import OperatorPredictor

SCHEMA = "foreplan.operator-predictor/2"

LICENCES: Mapping[str, str] = {
    "neusight": "sitar-lab/NeuSight, MIT, (c) 2025 Georgia Institute of Technology and Microsoft",
    "aiconfigurator": "ai-dynamo/aiconfigurator, Apache-2.0, (c) NVIDIA",
    "helix": "Thesys-lab/Helix-ASPLOS25, Apache-2.0",
    "foreplan": "measured by this project (foreplan.datasets.sweeps.operator_sweep), Apache-2.0",
}


def save(model: OperatorPredictor, folder: Path, facts: Mapping[str, Any]) -> dict[str, object]:
    """Write a fitted model.

    Args:
        model: fitted.
        folder: made if missing.
        facts: more fields of the card (``sources``, ``held_out``, ``metrics``); sources get their
            licence by format.

    Returns:
        The card.

    Raises:
        SpecError: the folder cannot be written.
    """
    tensors: dict[str, NDArray[Any]] = {}
    for index, expert in enumerate(model.experts_):
        for name, array in _compact(expert.trees.arrays()).items():
            tensors[f"{index}.{name}"] = array
        if expert.tiles is not None:
            for name, array in _compact(expert.tiles.arrays()).items():
                tensors[f"{index}.tiles.{name}"] = array
    sources = [
        {**source, "licence": LICENCES.get(source.get("format", ""), "unknown")}
        for source in facts.get("sources", ())
    ]
    card: dict[str, object] = {
        "schema": SCHEMA,
        "name": "library operators",
        "method": "chip experts (gradient-boosted trees on dimensionless features) that correct a "
        "tile-and-wave time, mixed by device likeness; bounded by the roofline",
        "label": "torch: mean of the 5 fastest of 25 eager calls, launch included; other libraries:"
        " as published, in CUDA graphs",
        "parameters": {
            "trees": model.trees, "depth": model.depth, "rate": model.rate, "seed": model.seed,
            "gate": asdict(model.gate or GateScales()),
        },
        **facts,
        "sources": sources,
        "unseen_chip_quantiles": model.quantiles_,
        "experts": [
            {
                "family": expert.family,
                "device": expert.device.model_dump(
                    mode="json", exclude_none=True, exclude={"sources", "notes"}
                ),
                "library": expert.library, "dtype": expert.dtype, "rows": expert.rows,
                "overhead_s": expert.overhead_s,
                "seen_quantile": expert.seen_quantile, "offsets": expert.offsets,
                "tiles": expert.tiles is not None,
            }
            for expert in model.experts_
        ],
    }  # fmt: skip
    write_model(folder, tensors, card)
    return card


def load(folder: Path) -> OperatorPredictor:
    """Read a model that `save` wrote.

    Raises:
        SpecError: another schema, a broken file, or a card and weights that do not agree.
    """
    from foreplan.cost_models.operators.operator_predictor import OperatorPredictor

    found, parameters = _read(folder)
    model = OperatorPredictor(**parameters, gate=found.gate)
    model.experts_, model.quantiles_ = found.experts_, found.quantiles_
    return model


def load_experts(folder: Path) -> FittedExperts:
    """Read what a model that `save` wrote predicts with; loads no scikit-learn.

    Raises:
        SpecError: as `load`.
    """
    return _read(folder)[0]


def _read(folder: Path) -> tuple[FittedExperts, dict[str, Any]]:
    """Experts, and the settings that they were fitted with but the gate."""
    from foreplan.cost_models.operators.fitted_experts import FittedExperts
    from foreplan.cost_models.operators.operator_experts import Expert

    card = read_card(folder)
    if card.get("schema") != SCHEMA:
        other = str(card.get("schema")).partition("/")[0] != SCHEMA.partition("/")[0]
        raise SpecError(
            f"{folder}/card.json: schema", got=card.get("schema"), expected=SCHEMA,
            fix="use pretrained:ops, or a folder that 'foreplan train' wrote from operators"
            if other else "train it again",
        )  # fmt: skip
    tensors = read_weights(folder, card)
    try:
        entries: Any = card["experts"]
        parameters: Any = card["parameters"]
        gate = GateScales(**parameters["gate"])
        settings = {name: parameters[name] for name in ("trees", "depth", "rate", "seed")}
        experts = [
            Expert(
                family=entry["family"],
                device=validate(Device, entry["device"], f"{folder}/card.json: experts[{index}]"),
                library=entry["library"], dtype=entry["dtype"], rows=entry["rows"],
                trees=TreeEnsemble(_restore(tensors, f"{index}")),
                overhead_s=entry["overhead_s"],
                seen_quantile=entry["seen_quantile"], offsets=entry["offsets"],
                tiles=TreeEnsemble(_restore(tensors, f"{index}.tiles")) if entry["tiles"] else None,
            )
            for index, entry in enumerate(entries)
        ]  # fmt: skip
        quantiles: Any = card["unseen_chip_quantiles"]
        found = FittedExperts(experts, {str(k): float(v) for k, v in quantiles.items()}, gate)
        scales = [value for value in asdict(gate).values() if not 1e-3 < value < 1e3]
        if scales or not all(map(_sound, experts)):
            raise ValueError("a text or a number where another belongs")
    except MISFITS as error:
        raise SpecError(
            str(folder), got=str(error), expected="weights that fit the card"
        ) from error
    return found, settings


def _sound(expert: Expert) -> bool:
    """Whether the fields of a card's entry are of their types and sizes."""
    numbers = [expert.seen_quantile, *expert.overhead_s.values(), *expert.offsets.values()]
    return (
        expert.family in FAMILIES
        and expert.dtype in PRECISIONS
        and isinstance(expert.library, str)
        and type(expert.rows) is int
        and all(type(number) in (int, float) and abs(number) < 1e6 for number in numbers)
    )


def _compact(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Splits and leaves apart: a leaf needs a value alone, a split no leaf's precision."""
    split = arrays["feature"] >= 0
    value = arrays["value"]
    return {
        "roots": arrays["roots"].astype(np.int32),
        "feature": arrays["feature"].astype(np.int8),
        "threshold": value[split].astype(np.float32),
        "leaf": value[~split].astype(np.float16),
        # Children lie together, so the left child of a split is an offset from it.
        "step": (arrays["left"] - np.arange(len(value)))[split].astype(np.int16),
        "missing_left": np.packbits(arrays["missing_left"][split].astype(bool)),
    }


def _restore(tensors: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    packed = {name: tensors[f"{prefix}.{name}"] for name in
              ("roots", "feature", "threshold", "leaf", "step", "missing_left")}  # fmt: skip
    feature = packed["feature"].astype(np.int16)
    split = feature >= 0
    value = np.zeros(len(feature), dtype=np.float32)
    value[split], value[~split] = packed["threshold"], packed["leaf"].astype(np.float32)
    left = np.full(len(feature), -1, dtype=np.int32)
    left[split] = packed["step"].astype(np.int32) + np.flatnonzero(split)
    missing = np.zeros(len(feature), dtype=bool)
    missing[split] = np.unpackbits(packed["missing_left"])[: int(split.sum())].astype(bool)
    return {"roots": packed["roots"], "feature": feature, "value": value, "left": left,
            "missing_left": missing}  # fmt: skip
