"""`refuse_longer`, `refuse_experts`: models that something cannot take, in one line each."""

from __future__ import annotations

from foreplan.datasets.models.model import Model
from foreplan.errors import SpecError


def refuse_longer(model: Model, tokens: int, where: str, got: object) -> None:
    """Raise where a sequence is longer than `Model.max_sequence`.

    Args:
        model: that is to read it.
        tokens: its length.
        where: field that says so.
        got: its value.

    Raises:
        SpecError: it is longer.
    """
    if tokens <= model.max_sequence:
        return
    most = f"at most the {model.max_sequence} that {model.name} can attend to"
    if model.max_sequence < model.max_positions:
        most += " before it rotates by other frequencies: longer ones are not computed"
    raise SpecError(where, got=got, expected=most)


def refuse_experts(model: Model, doing: str) -> None:
    """Raise where something only knows dense layers.

    Args:
        model: that it is asked for.
        doing: what that is, in words.

    Raises:
        SpecError: a layer of the model has experts.
    """
    if model.experts is not None:
        raise SpecError(
            f"model {model.name}", got="layers of experts", expected=f"a dense model: {doing}"
        )
