"""Models by name or path: ``pretrained:ops``, ``roofline``, or a folder that training wrote."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from foreplan.cost_models.evaluation import OperatorModel
from foreplan.datasets.storage import exclusive, write_atomically
from foreplan.errors import MissingDataError, SpecError

#: Weights that ship with the project, by the name after ``pretrained:``.
PRETRAINED = Path(__file__).with_name("pretrained")

WEIGHTS, CARD = "weights.safetensors", "card.json"
#: Weights on their way to become those of the folder.
_NEW_WEIGHTS = "weights.new.safetensors"
#: Field of the card that binds it to its weights.
CHECKSUM = "weights_sha256"
#: What building a model from a card and tensors that do not agree can raise.
MISFITS = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError)


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
        raise SpecError(
            "trained model", got=text,
            expected="pretrained:ops, pretrained:programs or a trained model's folder",
        )  # fmt: skip
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


def write_model(folder: Path, tensors: Mapping[str, NDArray[Any]], card: Mapping[str, Any]) -> None:
    """Write a model; a folder that holds one holds the old or the new one at every moment.

    The new weights go beside the old ones until the card names them by their checksum.

    Raises:
        SpecError: the folder cannot be written.
    """
    from safetensors.numpy import save

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(str(folder), got=str(error), expected="a folder to write to") from error
    data = save(dict(tensors))
    text = json.dumps(
        {**card, CHECKSUM: hashlib.sha256(data).hexdigest()}, indent=1, sort_keys=True
    )
    with exclusive(folder / CARD, wait=True):
        write_atomically(folder / _NEW_WEIGHTS, data)
        write_atomically(folder / CARD, text + "\n")
        try:
            os.replace(folder / _NEW_WEIGHTS, folder / WEIGHTS)
        except OSError as error:
            raise SpecError(str(folder), got=str(error), expected="a folder to write to") from error


def read_weights(folder: Path, card: Mapping[str, object]) -> dict[str, NDArray[Any]]:
    """The tensors of a saved model.

    Raises:
        SpecError: they cannot be read, are damaged, or are those of another card.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    path = folder / WEIGHTS
    wanted = card.get(CHECKSUM)  # models of before the checksum have none
    try:
        data = _bytes_of(path, wanted) or _bytes_of(folder / _NEW_WEIGHTS, wanted)
        tensors = {} if data is None else load(data)
    except (OSError, SafetensorError, *MISFITS) as error:
        raise SpecError(str(path), got=str(error), expected="weights that fit the card") from error
    if data is None:
        raise SpecError(
            str(path), got="damaged weights, or those of another card",
            expected="weights that fit the card", fix="train the model again, or fetch both files",
        )  # fmt: skip
    return tensors


def _bytes_of(path: Path, checksum: object) -> bytes | None:
    """A file's content if it has the checksum."""
    if checksum is not None and not path.exists():
        return None
    data = path.read_bytes()
    return data if checksum in (None, hashlib.sha256(data).hexdigest()) else None


def load_operator_model(name_or_path: str) -> OperatorModel:
    """A model of library operators.

    Args:
        name_or_path: ``roofline``, or as `model_folder`.

    Raises:
        MissingDataError: no such shipped model, or a baseline that must be fitted first.
        SpecError: no such path, or a model of something else.
    """
    from foreplan.cost_models.operators.baselines import BASELINES, baseline

    if name_or_path == "roofline":
        return baseline("roofline")  # type: ignore[no-any-return]
    if name_or_path in BASELINES:
        raise MissingDataError(
            f"baseline {name_or_path!r} has no weights of its own",
            fix="fit and score it with 'python -m foreplan.cost_models.operators.crossval'",
        )
    from foreplan.cost_models.operators.operator_weights import load_experts

    return load_experts(model_folder(name_or_path))
