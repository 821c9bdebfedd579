"""Tables of the models known by name, for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group

from foreplan.planner.report._grid import Column, Grid


def models_table(found: Sequence[Mapping[str, Any]]) -> Group:
    """Decoders, then networks that no plan takes, a row each.

    Args:
        found: from `model_zoo.zoo_documents` and `network_zoo.network_documents`, each with
            ``plans``.
    """
    decoders = [model for model in found if model["plans"]]
    networks = [model for model in found if not model["plans"]]
    return Group(
        Grid(
            "Models, by the name that --model and predict take",
            [
                Column("model", _cells(decoders, "name")),
                Column("family", _cells(decoders, "family")),
                Column("layers", _cells(decoders, "layers"), True),
                Column("width", _cells(decoders, "hidden"), True, 60),
                Column("experts", [str(m["experts"] or "") for m in decoders], True, 70),
                Column("parameters", [f"{m['parameters'] / 1e9:.3g} billion" for m in decoders],
                       True),
            ],
        ),
        Grid(
            "Networks, for predict alone",
            [
                Column("network", _cells(networks, "name")),
                Column("family", _cells(networks, "family")),
                Column("takes", _cells(networks, "takes"), False, 80),
                Column("parameters", [f"{m['parameters'] / 1e6:.4g} million" for m in networks],
                       True),
            ],
        ),
    )  # fmt: skip


def _cells(found: Sequence[Mapping[str, Any]], field: str) -> list[str]:
    return [str(model[field]) for model in found]
