"""`module_of_file`: the module that a user's Python file defines, as ``my_model.py:name``.

The file is run, as ``python my_model.py`` would but without its ``__main__`` part: it is the user's
own code and can do whatever that can. Its folder is where it imports from; a file of a package is
imported as part of it. What it prints goes to stderr.

``name`` is a module, a class or function that makes one without arguments, or a function that
returns it with its inputs. Without a name the file's only module is taken, else the only class
that can be made. Inputs come from that function, from the module's ``example_inputs``, or from the
file's; each is a value, or a function that gives it. Functions may take the sizes `SIZES`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from foreplan.datasets.graphs.given_module import GivenModule
from foreplan.datasets.graphs.module_check import check_module
from foreplan.datasets.specs import nearest
from foreplan.errors import ForeplanError, SpecError

if TYPE_CHECKING:
    import torch

#: Sizes that functions of a file may take by name, and what they are where nobody says; of images
#: height and width.
SIZES: Mapping[str, Any] = MappingProxyType(
    {"batch": 1, "sequence_length": 128, "image_size": (224, 224)}
)

_INPUTS = "example_inputs"
_WORDS = re.compile(r"(?P<path>.+\.py)(?::(?P<name>.*))?")


def is_python_file(text: str) -> bool:
    """Whether a model is named as a Python file, perhaps with a name inside."""
    return _WORDS.fullmatch(text) is not None and not Path(text).is_dir()


def module_of_file(text: str, sizes: Mapping[str, Any] = MappingProxyType({})) -> GivenModule:
    """Run a file, and make its module.

    Args:
        text: which `is_python_file`.
        sizes: some of `SIZES` that were asked for; functions of the file must take them.

    Raises:
        SpecError: no such file or name, several to choose from, code that fails, no inputs, or
            sizes that nothing in the file takes.
    """
    words = _WORDS.fullmatch(text)
    assert words is not None
    source = _Source(Path(words["path"]).expanduser(), sizes)
    with own_code():
        module, inputs = source.made(words["name"])
        source.check_sizes()
        return GivenModule.of(text, module, inputs)


@contextlib.contextmanager
def own_code() -> Iterator[None]:
    """While a user's code runs: what it prints goes to stderr, and its arguments are none.

    Raises:
        SpecError: it ends the process.
    """
    before, sys.argv = sys.argv, sys.argv[:1]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except SystemExit as stop:
        raise SpecError(
            "model", got=_told(stop, Path()), expected="code that runs", fix=_mended(stop)
        ) from stop
    finally:
        sys.argv = before


class _Source:
    """A file that has been run, and which of the sizes its functions took."""

    def __init__(self, path: Path, sizes: Mapping[str, Any]) -> None:
        self.path, self.sizes = path, sizes
        self.taken: set[str] = set()
        self.called: list[str] = []
        if not path.is_file():
            beside = path.parent.glob("*.py") if path.parent.is_dir() else ()
            guess = nearest(path.name, (other.name for other in beside))
            raise SpecError(
                "model", got=str(path), expected="a file",
                fix=f"did you mean {path.with_name(guess)}?" if guess else None,
            )  # fmt: skip

    def made(self, name: str | None) -> tuple[torch.nn.Module, Any]:
        """The module of a name and its inputs."""
        import torch

        with self.failing(f"{self.path}"):
            file = _run(self.path)
        found = self.found(file, name)
        where = f"{self.path}:{name}" if name else f"{self.path}"
        if callable(found) and not isinstance(found, torch.nn.Module):
            where = f"{self.path}:{name or found.__name__}"
            found = self.call(found, where)
        inputs: Any = None
        if isinstance(found, tuple) and len(found) == 2:
            found, inputs = found
        if not isinstance(found, torch.nn.Module):
            raise SpecError(
                where, got=type(found).__name__,
                expected="a torch.nn.Module, or what makes one (a class or function)",
            )  # fmt: skip
        check_module(found)
        for owner in (found, file):
            if inputs is None:
                inputs = getattr(owner, _INPUTS, None)
                if callable(inputs) and not isinstance(inputs, torch.Tensor):
                    inputs = self.call(inputs, f"{self.path}:{_INPUTS}")
        if inputs is None:
            taken = ", ".join(inspect.signature(found.forward).parameters)
            raise SpecError(
                f"{self.path}: {_INPUTS}", got=None, expected=f"arguments of forward({taken})",
                fix=f"add {_INPUTS} = (torch.zeros(...),) to the file, or a function that "
                "returns (module, inputs)",
            )  # fmt: skip
        return found, inputs

    def found(self, file: ModuleType, name: str | None) -> Any:
        """What a name, or none, stands for."""
        return _candidate(file, self.path) if name is None else _inside(file, name, self.path)

    def call(self, make: Callable[..., Any], where: str) -> Any:
        """Call what makes a module or inputs, with the sizes that it takes."""
        try:
            parameters = inspect.signature(make).parameters.values()
        except (TypeError, ValueError):  # of compiled code
            parameters = ()  # type: ignore[assignment]
        lacking = [p.name for p in parameters if _required(p) and p.name not in SIZES]
        if lacking:
            raise SpecError(
                where, got=f"the arguments {', '.join(lacking)}",
                expected=f"none, or of {', '.join(SIZES)}",
                fix="name a function without arguments that makes it",
            )  # fmt: skip
        takes = {p.name: p for p in parameters if p.name in SIZES}
        sizes = {
            name: self.sizes.get(name, SIZES[name])
            for name, parameter in takes.items()
            if name in self.sizes or _required(parameter)
        }
        self.taken.update(takes)
        self.called.append(where)
        with self.failing(where):
            return make(**sizes)

    def check_sizes(self) -> None:
        """Refuse sizes that nothing took."""
        for size in self.sizes:
            if size not in self.taken:
                asked = self.sizes[size]
                what = " and ".join(self.called) or f"the inputs of {self.path}"
                raise SpecError(
                    f"--{size.replace('_', '-')}",
                    got="{} x {}".format(*asked) if isinstance(asked, tuple) else asked,
                    expected=f"none: {what} {'take' if ' and ' in what else 'takes'} none"
                    if self.called else f"none: {what} have their own shapes",
                    fix=f"write {_INPUTS} as a function of {size}",
                )  # fmt: skip

    @contextlib.contextmanager
    def failing(self, where: str) -> Iterator[None]:
        """Whatever the file's code raises, in a line that says where."""
        try:
            yield
        except (KeyboardInterrupt, ForeplanError):
            raise
        except BaseException as error:
            raise SpecError(
                where, got=_told(error, self.path), expected="code that runs", fix=_mended(error)
            ) from error


def _run(path: Path) -> ModuleType:
    """Import a file by its place."""
    folder = path.resolve().parent
    parts = [path.stem]
    while (folder / "__init__.py").is_file():  # part of a package, which its imports may name
        parts.insert(0, folder.name)
        folder = folder.parent
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    if len(parts) > 1:
        member = importlib.import_module(".".join(parts))
        if Path(member.__file__ or "").resolve() != path.resolve():
            raise SpecError(
                str(path), got=f"another package {parts[0]} at {member.__file__}",
                expected="a package of a name of its own",
            )  # fmt: skip
        return member
    # Under a name that nothing imported so far has: the file may be called torch.py.
    name = path.stem if path.stem not in sys.modules else f"_foreplan_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    file = importlib.util.module_from_spec(spec)
    sys.modules[name] = file  # where dataclasses look for it
    try:
        spec.loader.exec_module(file)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return file


def _inside(file: ModuleType, name: str, path: Path) -> Any:
    """What a name, perhaps with dots, stands for in a file."""
    try:
        return functools.reduce(getattr, name.split("."), file)
    except AttributeError:
        known = [w for w, value in vars(file).items() if w != _INPUTS and _makes(value, file)]
        guess = nearest(name, known)
        raise SpecError(
            f"{path}", got=name or "no name behind the colon",
            expected=f"one of {', '.join(known)}" if known else "a name in the file",
            fix=f"did you mean {path}:{guess}?" if guess else None,
        ) from None  # fmt: skip


def _candidate(file: ModuleType, path: Path) -> Any:
    """The only module of a file, or else its only class that can be made."""
    import torch

    own = {word: value for word, value in vars(file).items() if not word.startswith("_")}
    found: dict[str, Any] = {w: v for w, v in own.items() if isinstance(v, torch.nn.Module)}
    found = {w: v for w, v in found.items() if w == next(o for o in found if found[o] is v)}
    if not found:
        made = {w: v for w, v in own.items() if isinstance(v, type) and _makes(v, file)}
        found = {w: v for w, v in made.items() if not any(map(_required, _parameters(v)))}
    if len(found) == 1:
        return next(iter(found.values()))
    other = [w for w, v in own.items() if _makes(v, file) and w != _INPUTS]
    raise SpecError(
        f"{path}", got=", ".join(found) or "no module", expected="one torch.nn.Module",
        fix="say which: " + " or ".join(f"{path}:{w}" for w in list(found or other)[:6])
        if found or other else "make one in the file: model = MyModel(...)",
    )  # fmt: skip


def _makes(value: Any, file: ModuleType) -> bool:
    """Whether something of a file is a module, or a class or function of its own that makes one."""
    import torch

    if isinstance(value, type):
        return issubclass(value, torch.nn.Module) and value.__module__ == file.__name__
    if isinstance(value, torch.nn.Module):
        return True
    return inspect.isfunction(value) and value.__module__ == file.__name__


def _parameters(make: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(make).parameters.values())


def _required(parameter: inspect.Parameter) -> bool:
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in several


def _told(error: BaseException, path: Path) -> str:
    """An exception in a line, with the last line of the file's folder that it came through."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    folder = path.resolve().parent
    lines = [
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if folder in Path(frame.filename).resolve().parents
    ]
    if isinstance(error, SyntaxError):
        lines = [f"{Path(error.filename or path).name}:{error.lineno}"]
        text = error.msg
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"{said} ({lines[-1]})" if lines else said


def _mended(error: BaseException) -> str | None:
    if isinstance(error, ImportError) and "relative import" in str(error):
        return "import the sibling by its name alone, or make the folder a package (__init__.py)"
    if isinstance(error, ModuleNotFoundError):
        return "a file imports from its own folder and from what is installed beside foreplan"
    if isinstance(error, SystemExit):
        return 'keep what a script does under if __name__ == "__main__":'
    return None
