"""Seconds that a notebook gives, of the host or between operators: their types and their checks.

Shape legend: ``N`` steps of the pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.lowering.graph_step import PARTS, Part, Step
from foreplan.datasets.specs import nearest
from foreplan.errors import SpecError


class Array(Protocol):
    """An array of NumPy or a tensor of torch."""

    def __array__(self) -> Any:
        """As NumPy's."""


#: Time of the host: of an ATen call, of one by part of the pass, or before each step (N,).
LaunchSeconds = float | Mapping[Part, float] | Sequence[float] | Array | None
#: Seconds before each operator of a graph, of all or of each step (N,).
GapSeconds = float | Sequence[float] | Array | None

#: The two once they were checked.
CheckedSeconds = float | NDArray[np.float64]
CheckedLaunch = CheckedSeconds | dict[Part, float]

_EACH = "a number of seconds of at least 0, or one for each operator (N,)"


def checked_seconds(given: object, where: str) -> CheckedSeconds:
    """One number, or an array (N,) of a sequence, an array or a tensor.

    Args:
        given: finite numbers of at least 0.
        where: what to call it in an error.

    Raises:
        SpecError: something else.
    """
    try:
        values = np.asarray(given)
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        # Lists in a list of different lengths; a tensor on a GPU or with a gradient.
        raise SpecError(
            where, got=type(given).__name__, expected=_EACH, fix=str(error).split("\n")[0]
        ) from error
    if values.dtype.kind not in "iuf":
        raise SpecError(where, got=given, expected=_EACH)
    if values.ndim > 1:
        raise SpecError(where, got=f"an array of shape {values.shape}", expected=_EACH)
    bad = ~((values >= 0) & (values < math.inf))
    if bad.any():
        place = f"[{int(np.argmax(bad))}]" if values.ndim else ""
        got = float(values[bad][0] if values.ndim else values)
        raise SpecError(f"{where}{place}", got=got, expected="a number of at least 0")
    return values.astype(np.float64) if values.ndim else float(values)


def checked_launch(given: LaunchSeconds, execution: str, where: str) -> CheckedLaunch | None:
    """`LaunchSeconds` as a number, numbers by part or an array (N,).

    Args:
        given: as a user says it.
        execution: how the pass runs.
        where: what to call it in an error.

    Raises:
        SpecError: no seconds, no part of a pass, or no eager execution.
    """
    if given is None:
        return None
    check_eager(given, execution, where)
    if not isinstance(given, Mapping):
        return checked_seconds(given, where)
    return {_part(name, where): _one(value, f"{where}[{name!r}]") for name, value in given.items()}


def check_eager(given: object, execution: str, where: str) -> None:
    """Raise `SpecError` where seconds of the host are given for a graph, which has none."""
    if execution != "eager":
        raise SpecError(
            where, got=given, expected="eager execution: the host issues no operator of a graph"
        )


def check_steps(given: CheckedLaunch | None, steps: Sequence[Step], where: str) -> None:
    """Raise `SpecError` unless seconds are known of every step.

    Args:
        given: checked already; ``None`` stands for usual ones.
        steps: of the pass (N,).
        where: what to call it in an error.
    """
    if isinstance(given, Mapping):
        absent = [p for p in PARTS if p not in given and any(step.part == p for step in steps)]
        if absent:
            raise SpecError(
                where, got=f"no {', '.join(absent)}", expected="seconds of every part of the pass"
            )
    elif isinstance(given, np.ndarray) and len(given) != len(steps):
        raise SpecError(
            where, got=f"{len(given)} numbers",
            expected=f"one number, or {len(steps)}: one for each operator of the pass",
        )  # fmt: skip


def _part(name: object, where: str) -> Part:
    for part in PARTS:
        if name == part:
            return part
    guess = nearest(name, PARTS) if isinstance(name, str) else None
    raise SpecError(
        where, got=name, expected=f"parts of a pass: {', '.join(PARTS)}",
        fix=f"did you mean {guess}?" if guess else None,
    )  # fmt: skip


def _one(given: object, where: str) -> float:
    found = checked_seconds(given, where)
    if isinstance(found, float):
        return found
    raise SpecError(where, got=f"{len(found)} numbers", expected="one number of at least 0")
