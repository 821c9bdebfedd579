"""The model zoo: published decoder-only models by name, as `Model` without weights.

``zoo/models.yaml`` beside this module is the whole of it; weights of a zoo model are random. Models
that we trained lie in ``pretrained``, a folder each with a card.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foreplan.datasets.models.families import FAMILY_FACTS
from foreplan.datasets.models.model import Model
from foreplan.datasets.models.zoo_entries import zoo_entries
from foreplan.datasets.specs import nearest, validate
from foreplan.errors import SpecError

_FILE = Path(__file__).parents[1] / "zoo" / "models.yaml"
_PRETRAINED = Path(__file__).parents[1] / "pretrained"
_SCHEMA = "foreplan.model_zoo/1"
#: Fields of an entry that say where it is from rather than what the model is.
_NOTES = ("parameters", "source")
#: Fields of a model that tell its shape.
_SHAPE = ("name", "family", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab")


def zoo_names() -> tuple[str, ...]:
    """Names of the zoo's models, in the file's order."""
    return tuple(_entries())


def pretrained_folders() -> dict[str, Path]:
    """Folders of the trained models that come along, by name."""
    return {file.parent.name: file.parent for file in sorted(_PRETRAINED.glob("*/config.json"))}


def zoo_model(name: str) -> Model:
    """The zoo model called ``name``; its weights are random.

    Raises:
        SpecError: no such model.
    """
    entry = _entry(name)
    family = entry["family"]
    if family not in FAMILY_FACTS:
        raise SpecError(
            f"{_FILE.name}: models.{name}.family", got=family, expected=f"{sorted(FAMILY_FACTS)}"
        )
    heads = entry["heads"]
    facts = {
        "name": name,
        **FAMILY_FACTS[family],
        "kv_heads": heads,
        "head_dim": entry["hidden"] // heads,
        **{field: value for field, value in entry.items() if field not in _NOTES},
    }
    return validate(Model, facts, f"{_FILE.name}: models.{name}")


def published_parameters(name: str) -> int:
    """Parameters that the source of ``name`` publishes; for tests and tables.

    Raises:
        SpecError: no such model.
    """
    return int(_entry(name)["parameters"])


def zoo_documents() -> list[dict[str, Any]]:
    """Each model of the zoo as JSON: its shape, parameters counted from it, and the source."""
    documents = []
    for name, entry in _entries().items():
        model = zoo_model(name)
        documents.append(
            {
                **{field: getattr(model, field) for field in _SHAPE},
                "parameters": model.parameters,
                "experts": None if model.experts is None else model.experts.count,
                "source": entry.get("source"),
            }
        )
    return documents


def _entry(name: str) -> dict[str, Any]:
    entries = _entries()
    if name not in entries:
        guess = nearest(name, entries)
        raise SpecError(
            "model",
            got=name,
            expected=f"one of {', '.join(entries)}",
            fix=f"did you mean {guess!r}?" if guess else None,
        )
    return entries[name]


def _entries() -> dict[str, dict[str, Any]]:
    return zoo_entries(_FILE, _SCHEMA, "models")
