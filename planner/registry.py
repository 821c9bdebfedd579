"""The planners that are installed: ours, and those that packages register.

A package registers its planner under the entry point group ``foreplan.planners``; the name is the
kind. It then has a CLI command, a JSON Schema, simulation, verification and a report.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from foreplan.errors import SpecError
from foreplan.planner.base import Planner
from foreplan.planner.installed import Installed

_PLANNERS = Installed(
    "foreplan.planners",
    MappingProxyType(
        {
            "serving": "foreplan.planner.serving:ServingPlanner",
            "replicas": "foreplan.planner.serving.replicas:ReplicasPlanner",
            "precision": "foreplan.planner.precision:PrecisionPlanner",
            "bubbles": "foreplan.planner.bubbles:BubblesPlanner",
        }
    ),
    "a Planner",
)


def kinds() -> tuple[str, ...]:
    """Names of every planner, ours first."""
    return _PLANNERS.names()


def planner(kind: str) -> Planner[Any, Any]:
    """The planner of a kind.

    Raises:
        SpecError: no such planner, or its package does not provide one.
    """
    found = _PLANNERS.load(kind, "kind")
    made = found() if isinstance(found, type) else found
    if not isinstance(made, Planner):
        raise SpecError(f"planner {kind}", got=type(made).__name__, expected="a Planner")
    return made
