"""Table of the model zoo for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foreplan.planner.report._grid import Column, Grid


def models_table(found: Sequence[Mapping[str, Any]]) -> Grid:
    """One row a model, from `datasets.models.model_zoo.zoo_documents`."""

    def cells(field: str) -> list[str]:
        return [str(model[field]) for model in found]

    return Grid(
        "Models, by the name that --model takes",
        [
            Column("model", cells("name")),
            Column("family", cells("family")),
            Column("layers", cells("layers"), True),
            Column("width", cells("hidden"), True, 60),
            Column("experts", [str(model["experts"] or "") for model in found], True, 70),
            Column("parameters", [f"{m['parameters'] / 1e9:.3g} billion" for m in found], True),
        ],
    )
