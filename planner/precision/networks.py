"""The networks that a workload can name: ours, those of installed packages, registered ones.

A package registers a builder under the entry point group ``foreplan.networks``, as planners are
registered; a script registers one with `register_network`. A workload only ever *names* a network:
a plan that a stranger wrote can make no process import anything that was not installed for this.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING

from foreplan.datasets.model import Model
from foreplan.datasets.specs import nearest
from foreplan.errors import SpecError
from foreplan.planner.precision.spec import PrecisionWorkload

if TYPE_CHECKING:
    from foreplan.planner.precision.task import TrainingTask

GROUP = "foreplan.networks"

#: Called with (model, workload, seed).
Builder = Callable[["Model | None", PrecisionWorkload, int], "TrainingTask"]

_OURS: Mapping[str, str] = MappingProxyType(
    {
        "model": "foreplan.planner.precision.decoder_task:decoder_task",
        "byte_lm": "foreplan.planner.precision.execution.tasks:byte_lm",
        "digits_mlp": "foreplan.planner.precision.execution.tasks:digits_mlp",
        "digits_cnn": "foreplan.planner.precision.execution.tasks:digits_cnn",
    }
)
#: Never changed in place: a registration belongs to the context (thread, task) that made it.
_REGISTERED: ContextVar[Mapping[str, Builder]] = ContextVar(
    "networks", default=MappingProxyType({})
)


class Registration:
    """A network that workloads may name, until a ``with`` block of it ends, if there is one.

    Args:
        token: what was known before.
    """

    def __init__(self, token: Token[Mapping[str, Builder]]) -> None:
        self._token = token

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *error: object) -> None:
        _REGISTERED.reset(self._token)


def register_network(name: str, build: Builder) -> Registration:
    """Let workloads of this thread name a network, for good or inside of a ``with`` block.

    Processes that `foreplan verify` starts do not know it; a package's entry point they do.

    Args:
        name: what ``workload.network`` says; a later registration replaces an earlier one.
        build: called with (model, workload, seed) and returns a `TrainingTask`.

    Returns:
        Undoes the registration where it is used in a ``with`` statement.

    Raises:
        SpecError: the name of one of our own networks, or no plain word.
    """
    if name in _OURS or not name.isidentifier():
        raise SpecError("network", got=name, expected=f"a word other than {', '.join(_OURS)}")
    return Registration(_REGISTERED.set(MappingProxyType({**_REGISTERED.get(), name: build})))


def network_names() -> tuple[str, ...]:
    """Names of every network, ours first."""
    more = {*_REGISTERED.get(), *(point.name for point in _points())} - set(_OURS)
    return (*_OURS, *sorted(more))


def network_builder(name: str) -> Builder:
    """The builder of a network.

    Raises:
        SpecError: no network of that name, or its package does not provide one.
    """
    if name in _OURS:
        module, _, function = _OURS[name].partition(":")
        ours: Builder = getattr(importlib.import_module(module), function)
        return ours
    registered = _REGISTERED.get().get(name)
    if registered is not None:
        return registered
    point = next((p for p in _points() if p.name == name), None)
    if point is None:
        known = network_names()
        guess = nearest(name, known)
        raise SpecError(
            "workload.network", got=name, expected=f"one of {', '.join(known)}",
            fix=f"did you mean {guess}?" if guess
            else f"install a package that registers it under {GROUP!r}",
        )  # fmt: skip
    try:
        found = point.load()
    except Exception as error:  # a stranger's package may fail in any way
        raise SpecError(
            f"entry point {point.value}", got=error, expected="a builder of training tasks"
        ) from error
    if not callable(found):
        raise SpecError(
            f"network {name}", got=type(found).__name__, expected="a builder of training tasks"
        )
    builder: Builder = found
    return builder


def _points() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=GROUP))
