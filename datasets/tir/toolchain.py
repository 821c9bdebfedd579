"""Toolchain: which TVM is installed, checked before it is loaded.

``apache-tvm-ffi`` 0.1.15 ends the process with a segmentation fault in ``save_json`` and in every
MetaSchedule mutator, so the check reads the packages' metadata and never imports them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from foreplan.errors import MissingDataError, SpecError

_INSTALL = 'pip install "apache-tvm>=0.27.0.post1,<0.28" "apache-tvm-ffi>=0.1.14,<0.1.15"'
_LAST = "tvm.s_tir.tensor_intrin"
_TVM = ((0, 27), (0, 28))
_FFI = ((0, 1, 14), (0, 1, 15))


@dataclass(frozen=True, slots=True)
class Toolchain:
    """Versions that made a program.

    Attributes:
        tvm: version of ``apache-tvm``.
        ffi: version of ``apache-tvm-ffi``.
    """

    tvm: str
    ffi: str


def require_tvm() -> Toolchain:
    """Return the installed versions, or say what to install; to be called before ``import tvm``.

    Raises:
        MissingDataError: TVM is not installed.
        SpecError: a version outside the tested range.
    """
    tvm, ffi = _version("apache-tvm"), _version("apache-tvm-ffi")
    _check("apache-tvm", tvm, _TVM)
    _check("apache-tvm-ffi", ffi, _FFI)
    return Toolchain(tvm, ffi)


def load_runtime() -> Any:
    """Check the versions, load TVM for what runs built programs and return the package ``tvm``.

    That is half of the seconds that `load_tvm` takes, in each process that times programs.

    Raises:
        MissingDataError: TVM is not installed.
        SpecError: a version outside the tested range.
    """
    if "tvm" not in sys.modules:
        require_tvm()
    return importlib.import_module("tvm")


def load_tvm() -> Any:
    """Check the versions, load TVM with MetaSchedule and return the package ``tvm``.

    It has no type stubs, hence ``Any``.

    Raises:
        MissingDataError: TVM is not installed.
        SpecError: a version outside the tested range.
    """
    if _LAST not in sys.modules:
        require_tvm()
        importlib.import_module("tvm.s_tir.meta_schedule")
        with _no_search_of_modules():
            importlib.import_module(_LAST)
    return sys.modules["tvm"]


@contextmanager
def _no_search_of_modules() -> Iterator[None]:
    """Answer ``inspect.getmodule`` with "unknown" for a while.

    TVM's scripts call ``inspect.stack`` some hundred times while they load, each call asks every
    loaded module for its file, and transformers answers by importing submodule after submodule:
    minutes, where this takes a second. Source lines are found without the module as well.
    """
    search = inspect.getmodule
    inspect.getmodule = lambda *_: None
    try:
        yield
    finally:
        inspect.getmodule = search


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise MissingDataError(
            f"{package} is not installed; scheduled tensor programs are built with TVM",
            fix=_INSTALL,
        ) from None


def _check(package: str, found: str, limits: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    numbers = tuple(int(part) for part in re.findall(r"\d+", found.split("+")[0])[:3])
    low, high = limits
    if not low <= numbers[: len(low)] < high:
        shown = " and ".join((">=" + ".".join(map(str, low)), "<" + ".".join(map(str, high))))
        raise SpecError(package, got=found, expected=shown, fix=_INSTALL)
