"""Weights of the operator predictor on disk: ``weights.safetensors`` and ``card.json``.

Thresholds and leaves are kept in half precision where that loses nothing that matters (leaves) and
in single precision where it might (thresholds). The card says what every expert was fitted on, from
which sources, under which licences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    from foreplan.cost_models.operators.operator_tuning import Tuning
    from foreplan.cost_models.operators.tuned_experts import TunedExperts

SCHEMA = "foreplan.operator-predictor/2"
#: Of experts that were fine-tuned (`tuned_experts`): who reads the experts alone would be told what
#: nobody measured.
TUNED_SCHEMA = "foreplan.operator-predictor/3"

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
        tensors |= _packed(f"{index}", expert.trees)
        if expert.tiles is not None:
            tensors |= _packed(f"{index}.tiles", expert.tiles)
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
        "sources": _licensed(facts.get("sources", ())),
        "unseen_chip_quantiles": model.quantiles_,
        "experts": [
            {
                "family": expert.family, "device": _figures(expert.device),
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


def save_tuned(
    model: TunedExperts, start: Path, folder: Path, facts: Mapping[str, Any]
) -> dict[str, object]:
    """Write fine-tuned experts with the model that they started from.

    Args:
        model: fine-tuned.
        start: folder of that model, which `save` wrote.
        folder: made if missing.
        facts: as `save`; its sources stand behind those of the start.

    Returns:
        The card.

    Raises:
        SpecError: the folder cannot be written, or the start is no longer readable.
    """
    card = read_card(start)
    tensors = dict(read_weights(start, card))
    tunings = list(model.tunings_.values())
    for index, tuning in enumerate(tunings):
        if tuning.trees is not None:
            tensors |= _packed(f"tuning{index}", tuning.trees)
        for kind, made in tuning.adjustments.items():
            for name in ("weights", "centre", "scale"):
                tensors[f"tuning{index}.{kind}.{name}"] = getattr(made, name)
    before: Any = card.get("sources", ())
    new = {
        **card,
        **facts,
        "schema": TUNED_SCHEMA,
        "sources": [*before, *_licensed(facts.get("sources", ()))],
        "tunings": [
            {
                "family": tuning.family, "device": _figures(tuning.device),
                "library": tuning.library, "dtype": tuning.dtype,
                "trees": tuning.trees is not None, "quantiles": dict(tuning.quantiles),
                "kinds": {
                    kind: {
                        "rows": judged.rows, "mape_before": judged.before,
                        "mape_unseen": judged.unseen,
                        "host": tuning.adjustments[kind].host
                        if kind in tuning.adjustments else None,
                    }
                    for kind, judged in tuning.judged.items()
                },
            }
            for tuning in tunings
        ],
    }  # fmt: skip
    write_model(folder, tensors, new)
    return new


def load(folder: Path) -> OperatorPredictor:
    """Read a model that `save` wrote.

    Raises:
        SpecError: another schema, a broken file, a card and weights that do not agree, or a model
            that was fine-tuned, which has no settings to fit it anew.
    """
    from foreplan.cost_models.operators.operator_predictor import OperatorPredictor
    from foreplan.cost_models.operators.tuned_experts import TunedExperts

    found, parameters = _read(folder)
    if isinstance(found, TunedExperts):
        raise SpecError(
            f"{folder}/card.json: schema", got=TUNED_SCHEMA, expected=SCHEMA,
            fix="read fine-tuned experts with foreplan.Predictor.load",
        )  # fmt: skip
    model = OperatorPredictor(**parameters, gate=found.gate)
    model.experts_, model.quantiles_ = found.experts_, found.quantiles_
    return model


def load_experts(folder: Path) -> FittedExperts:
    """Read what a model that `save` or `save_tuned` wrote predicts with; loads no scikit-learn.

    Raises:
        SpecError: as `load`.
    """
    return _read(folder)[0]


def _read(folder: Path) -> tuple[FittedExperts, dict[str, Any]]:
    """Experts, and the settings that they were fitted with but the gate."""
    from foreplan.cost_models.operators.fitted_experts import FittedExperts
    from foreplan.cost_models.operators.operator_experts import Expert
    from foreplan.cost_models.operators.tuned_experts import TunedExperts

    card = read_card(folder)
    if card.get("schema") not in (SCHEMA, TUNED_SCHEMA):
        other = str(card.get("schema")).partition("/")[0] != SCHEMA.partition("/")[0]
        raise SpecError(
            str(folder), got=f"a model of schema {card.get('schema')}",
            expected=f"one of library operators ({SCHEMA})",
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
        if card["schema"] == TUNED_SCHEMA:
            found = TunedExperts(found, _tunings(card["tunings"], tensors, folder))
    except MISFITS as error:
        raise SpecError(
            str(folder), got=str(error), expected="weights that fit the card"
        ) from error
    return found, settings


def _tunings(entries: Any, tensors: Mapping[str, NDArray[Any]], folder: Path) -> list[Tuning]:
    from foreplan.cost_models.operators.operator_tuning import Adjustment, Judged, Tuning

    found = []
    for index, entry in enumerate(entries):
        adjustments, judged = {}, {}
        for kind, facts in entry["kinds"].items():
            judged[kind] = Judged(
                int(facts["rows"]), float(facts["mape_before"]), facts["mape_unseen"]
            )
            if facts["host"] is not None:
                weights, centre, scale = (
                    np.asarray(tensors[f"tuning{index}.{kind}.{name}"], dtype=np.float64)
                    for name in ("weights", "centre", "scale")
                )
                adjustments[kind] = Adjustment(float(facts["host"]), weights, centre, scale)
        if entry["family"] not in FAMILIES or entry["dtype"] not in PRECISIONS:
            raise ValueError(f"tunings[{index}] of no known operator")
        found.append(
            Tuning(
                family=entry["family"],
                device=validate(Device, entry["device"], f"{folder}/card.json: tunings[{index}]"),
                library=str(entry["library"]), dtype=entry["dtype"], judged=judged,
                adjustments=adjustments,
                trees=TreeEnsemble(_restore(tensors, f"tuning{index}")) if entry["trees"] else None,
                quantiles={kind: float(value) for kind, value in entry["quantiles"].items()},
            )
        )  # fmt: skip
    return found


def _figures(device: Device) -> dict[str, Any]:
    """What a card says of a device."""
    return device.model_dump(mode="json", exclude_none=True, exclude={"sources", "notes"})


def _licensed(sources: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Sources with the licence of their format."""
    return [{**s, "licence": LICENCES.get(s.get("format", ""), "unknown")} for s in sources]


def _packed(prefix: str, trees: TreeEnsemble) -> dict[str, NDArray[Any]]:
    return {f"{prefix}.{name}": array for name, array in _compact(trees.arrays()).items()}


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
