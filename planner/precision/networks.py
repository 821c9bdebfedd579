"""The networks that a workload can name: ours, those of installed packages, registered ones.

A package registers a builder under the entry point group ``foreplan.networks``, as planners are
registered; a script registers one with `register_network`. A workload only ever *names* a network:
a plan that a stranger wrote can make no process import anything that was not installed for this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from types import MappingProxyType
from typing import TYPE_CHECKING

from foreplan.datasets.models.model import Model
from foreplan.errors import SpecError
from foreplan.planner.installed import Installed
from foreplan.planner.precision.spec import PrecisionWorkload

if TYPE_CHECKING:
    from foreplan.planner.precision.task import TrainingTask

#: Called with (model, workload, seed).
Builder = Callable[["Model | None", PrecisionWorkload, int], "TrainingTask"]

_NETWORKS = Installed(
    "foreplan.networks",
    MappingProxyType(
        {
            "model": "foreplan.planner.precision.decoder_task:decoder_task",
            "byte_lm": "foreplan.planner.precision.execution.tasks:byte_lm",
            "digits_mlp": "foreplan.planner.precision.execution.tasks:digits_mlp",
            "digits_cnn": "foreplan.planner.precision.execution.tasks:digits_cnn",
        }
    ),
    "a builder of training tasks",
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
        SpecError: the name of one of our own networks, or no plain word; a builder that cannot be
            called.
    """
    if name in _NETWORKS.ours or not name.isidentifier():
        raise SpecError(
            "network", got=name,
            expected=f"a word of letters, digits and _ other than {', '.join(_NETWORKS.ours)}",
        )  # fmt: skip
    if not callable(build):
        raise SpecError(
            f"network {name}", got=type(build).__name__, expected=_NETWORKS.expected,
            fix=f"lambda model, workload, seed: {type(build).__name__}(...)",
        )  # fmt: skip
    return Registration(_REGISTERED.set(MappingProxyType({**_REGISTERED.get(), name: build})))


def network_names() -> tuple[str, ...]:
    """Names of every network, ours first."""
    return _NETWORKS.names(_REGISTERED.get())


def network_builder(name: str) -> Builder:
    """The builder of a network.

    Raises:
        SpecError: no network of that name, or its package does not provide one.
    """
    registered = _REGISTERED.get()
    if name in registered:
        return registered[name]
    found = _NETWORKS.load(name, "workload.network", registered)
    if not callable(found):
        raise SpecError(f"network {name}", got=type(found).__name__, expected=_NETWORKS.expected)
    builder: Builder = found
    return builder
