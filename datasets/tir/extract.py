"""extract: a network becomes tasks with call counts, through torch.export and TVM Relax.

Blocks that repeat are captured once. With ``c(n)`` the calls of a task in a network of n blocks,
``c(n) = c(1) + (n - 1) * (c(2) - c(1))`` holds where operators fuse at most across one block
boundary; a task for which it would go negative makes the whole network be captured instead.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from foreplan.datasets.tir.networks import Network, Shape
from foreplan.datasets.tir.task import Task
from foreplan.datasets.tir.toolchain import load_tvm
from foreplan.errors import SpecError

if TYPE_CHECKING:
    import torch


class _Found(NamedTuple):
    name: str
    module: str
    calls: int


def extract(network: Network, shape: Shape, *, backward: bool = False) -> list[Task]:
    """Return the tasks of a network of the zoo at one shape.

    Args:
        network: what to capture.
        shape: one of its shapes, or another of the same keys.
        backward: capture forward and backward operators of a training step instead; the label
            ends in ``/training`` then.

    Raises:
        MissingDataError: no TVM.
        SpecError: TVM of another version, or a network that cannot be captured.
    """
    label = network.label(shape) + ("/training" if backward else "")
    load_tvm()  # before transformers is loaded, see there

    def capture(layers: int) -> dict[str, _Found]:
        module, inputs = network.build(shape, layers)
        if backward:
            from foreplan.datasets.tir.backward import gradient

            module, inputs = gradient(module, inputs)
        return _capture(module, inputs, label)

    if network.layers <= 2:
        found = capture(network.layers)
    else:
        found = _grow(capture(1), capture(2), network.layers) or capture(network.layers)
    return _tasks(found, label, network.family)


def extract_module(
    module: torch.nn.Module, inputs: Sequence[Any], name: str, *, family: str | None = "user"
) -> list[Task]:
    """Return the tasks of any torch module.

    Args:
        module: in evaluation mode; weights may be empty.
        inputs: positional example inputs, on the module's device.
        name: what the tasks' callers are called.
        family: family it is held out with; ``None`` for tasks that always may be trained on.

    Raises:
        MissingDataError: no TVM.
        SpecError: TVM of another version, or a model that does not export.
    """
    return _tasks(_capture(module, tuple(inputs), name), name, family)


def _tasks(found: Mapping[str, _Found], label: str, family: str | None) -> list[Task]:
    families = frozenset() if family is None else frozenset({family})
    return [
        Task(key, item.name, item.module, MappingProxyType({label: item.calls}), families)
        for key, item in found.items()
        if item.calls > 0
    ]


def _grow(
    one: Mapping[str, _Found], two: Mapping[str, _Found], layers: int
) -> dict[str, _Found] | None:
    """Calls of a network of ``layers`` blocks, or ``None`` where they do not grow linearly."""
    grown = {}
    for key in {**one, **two}:
        first = one[key].calls if key in one else 0
        second = two[key].calls if key in two else 0
        calls = first + (layers - 1) * (second - first)
        if calls < 0:
            return None
        grown[key] = (two.get(key) or one[key])._replace(calls=calls)
    return grown


def _capture(module: torch.nn.Module, inputs: tuple[Any, ...], label: str) -> dict[str, _Found]:
    load_tvm()
    import torch

    with _quiet():
        try:
            with torch.no_grad():
                exported = torch.export.export(module, inputs, strict=False)
        except Exception as error:  # torch.export raises whatever the model's code raises
            raise _refused(label, error, "a model that torch.export captures") from error
        try:
            return _lower(exported)
        except Exception as error:  # the front end raises AssertionError, KeyError, TVMError...
            raise _refused(label, error, "operators that TVM Relax knows") from error


def _refused(label: str, error: Exception, expected: str) -> SpecError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # TVM prints a stack first and the reason last, torch the other way round.
    reason = lines[-1] if lines and lines[0].startswith("Traceback") else "".join(lines[:1])
    return SpecError(
        f"network {label}",
        got=f"{type(error).__name__}: {reason[:90]}",
        expected=expected,
        fix="capture a smaller part of it, or with attention implementation 'eager'",
    )


def _lower(exported: torch.export.ExportedProgram) -> dict[str, _Found]:
    tvm = load_tvm()
    relax = importlib.import_module("tvm.relax")
    front_end = importlib.import_module("tvm.relax.frontend.torch")
    structural_hash = importlib.import_module("tvm_ffi").structural_hash
    module = front_end.from_exported_program(
        exported, keep_params_as_input=True, unwrap_unit_return_tuple=True
    )
    passes = (
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
    )
    module = tvm.transform.Sequential(passes)(module)
    found: dict[str, _Found] = {}
    # Tasks are the same for every target; one has to be named.
    target = tvm.target.Target({"kind": "llvm", "num-cores": 1})
    for item in tvm.s_tir.meta_schedule.relax_integration.extract_tasks(module, target):
        program = item.dispatched[0]
        key = f"{structural_hash(program):016x}"
        calls = int(item.weight) + (found[key].calls if key in found else 0)
        found[key] = _Found(str(item.task_name), tvm.ir.save_json(program), calls)
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep deprecations inside torch and TVM from the caller, for whom they mean nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
