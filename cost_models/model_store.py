"""Models by name or path: ``pretrained:ops``, ``roofline``, or a folder that training wrote."""

from __future__ import annotations

import json
import os
from pathlib import Path

from foreplan.cost_models.evaluation import OperatorModel
from foreplan.errors import MissingDataError, SpecError

#: Weights that ship with the project, by the name after ``pretrained:``.
PRETRAINED = Path(__file__).with_name("pretrained")


def model_folder(name_or_path: str | os.PathLike[str]) -> Path:
    """The folder of a saved model.

    Args:
        name_or_path: ``pretrained:NAME``, a folder, or its ``card.json``.

    Raises:
        MissingDataError: no such shipped model.
        SpecError: no such path, or no card in it.
    """
    text = os.fspath(name_or_path)
    if text.startswith("pretrained:"):
        folder = PRETRAINED / text.removeprefix("pretrained:")
        if not (folder / "card.json").is_file():
            shipped = sorted(p.parent.name for p in PRETRAINED.glob("*/card.json"))
            raise MissingDataError(
                f"no shipped model {text!r}; there are "
                + (", ".join(f"pretrained:{name}" for name in shipped) or "none"),
                fix="train one with 'foreplan train'",
            )
        return folder
    path = Path(text)
    folder = path.parent if path.name == "card.json" else path
    if not (folder / "card.json").is_file():
        raise SpecError("--model", got=text, expected="pretrained:NAME or a trained model's folder")
    return folder


def read_card(folder: Path) -> dict[str, object]:
    """The JSON card of a saved model.

    Raises:
        SpecError: the card cannot be read or is no JSON object.
    """
    path = folder / "card.json"
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(str(path), got=str(error), expected="a model's JSON card") from error
    if not isinstance(card, dict):
        raise SpecError(str(path), got=card, expected="a JSON object")
    return card


def load_operator_model(name_or_path: str) -> OperatorModel:
    """A model of library operators.

    Args:
        name_or_path: ``roofline``, or as `model_folder`.

    Raises:
        MissingDataError: no such shipped model, or a baseline that must be fitted first.
        SpecError: no such path, or a model of something else.
    """
    from foreplan.cost_models.baselines import BASELINES, baseline

    if name_or_path == "roofline":
        return baseline("roofline")  # type: ignore[no-any-return]
    if name_or_path in BASELINES:
        raise MissingDataError(
            f"baseline {name_or_path!r} has no weights of its own",
            fix="fit and score it with 'python -m foreplan.cost_models.crossval'",
        )
    from foreplan.cost_models.operator_predictor import OperatorPredictor

    return OperatorPredictor.load(model_folder(name_or_path))
