"""The planners that are installed: ours, and those that packages register.

A package registers its planner under the entry point group ``foreplan.planners``; the name is the
kind. It then has a CLI command, a JSON Schema, simulation, verification and a report.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from foreplan.datasets.specs import nearest
from foreplan.errors import SpecError
from foreplan.planner.base import Planner

GROUP = "foreplan.planners"

_OURS: Mapping[str, str] = MappingProxyType(
    {
        "serving": "foreplan.planner.serving:ServingPlanner",
        "replicas": "foreplan.planner.serving.replicas:ReplicasPlanner",
        "precision": "foreplan.planner.precision:PrecisionPlanner",
        "bubbles": "foreplan.planner.bubbles:BubblesPlanner",
    }
)


def kinds() -> tuple[str, ...]:
    """Names of every planner, ours first."""
    return (*_OURS, *sorted(point.name for point in _points() if point.name not in _OURS))


def planner(kind: str) -> Planner[Any, Any]:
    """The planner of a kind.

    Raises:
        SpecError: no such planner, or its package does not provide one.
    """
    if kind in _OURS:
        module, name = _OURS[kind].split(":")
        found = getattr(importlib.import_module(module), name)
    else:
        point = next((p for p in _points() if p.name == kind), None)
        if point is None:
            guess = nearest(kind, kinds())
            raise SpecError(
                "kind", got=kind, expected=f"one of {', '.join(kinds())}",
                fix=f"did you mean {guess}?" if guess else None,
            )  # fmt: skip
        try:
            found = point.load()
        except Exception as error:  # a stranger's package may fail in any way
            where = f"entry point {point.value}"
            raise SpecError(where, got=error, expected="a Planner") from error
    made = found() if isinstance(found, type) else found
    if not isinstance(made, Planner):
        raise SpecError(f"planner {kind}", got=type(made).__name__, expected="a Planner")
    return made


def _points() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=GROUP))
