"""A user's own Python file: what is found in it, with which inputs; what is said of mistakes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from foreplan.datasets.graphs.given_module import GivenModule
from foreplan.datasets.graphs.python_file import is_python_file, module_of_file
from foreplan.errors import SpecError

NET = """
import torch
from torch import nn
class Block(nn.Module):
    def __init__(self, width): super().__init__(); self.body = nn.Linear(width, width)
    def forward(self, x): return self.body(x)
class Net(nn.Module):
    def __init__(self): super().__init__(); self.block = Block(8)
    def forward(self, x): print("in forward"); return self.block(x)
"""
INPUTS = "example_inputs = torch.zeros(2, 8)\n"


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """Modules and places of a test's files are those of this test alone."""
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if "tmp" in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def _file(folder: Path, code: str, name: str = "net.py") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(code)
    return str(folder / name)


def _refused(path: str, **sizes: Any) -> str:
    with pytest.raises(SpecError) as caught:
        module_of_file(path, sizes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "is_one"),
    [("net.py", True), ("a/net.py:Net", True), ("net.py:", True), ("gpt2", False),
     ("net.pyc", False), ("x.python", False)],
)  # fmt: skip
def test_a_file_is_known_by_its_name(text: str, is_one: bool) -> None:
    assert is_python_file(text) == is_one


def test_a_folder_may_be_called_like_a_file(tmp_path: Path) -> None:
    (tmp_path / "bert.py").mkdir()
    assert not is_python_file(str(tmp_path / "bert.py"))


@pytest.mark.parametrize(
    ("code", "name", "kind"),
    [(NET + INPUTS, "", "Net"),  # the only class that needs no argument
     (NET + INPUTS, ":Net", "Net"),
     (NET + INPUTS + "model = Block(8)\nagain = model\n", "", "Block"),  # what is made goes first
     (NET + "def build(): return Net(), (torch.zeros(2, 8),)\n", ":build", "Net"),
     (NET + INPUTS + "def build(): return Block(8)\n", ":build", "Block"),
     (NET + INPUTS + "outer = Net()\n", ":outer.block", "Block"),
     (NET + "class Own(Net):\n    example_inputs = torch.zeros(2, 8)\n", ":Own", "Own"),
     (NET + "def example_inputs(): return [torch.zeros(2, 8)]\n", "", "Net")],
)  # fmt: skip
def test_what_a_file_defines_is_found(tmp_path: Path, code: str, name: str, kind: str) -> None:
    given = module_of_file(_file(tmp_path, code) + name)
    assert type(given.module).__name__ == kind
    assert [list(value.shape) for value in given.inputs] == [[2, 8]]
    assert given.name.endswith("net.py" + name)


def test_functions_take_sizes_by_name(tmp_path: Path) -> None:
    code = NET + "def example_inputs(batch, image_size=(2, 8)): return torch.zeros(batch, 8)\n"
    path = _file(tmp_path, code)
    for sizes, rows in (({}, 1), ({"batch": 5}, 5)):
        (value,) = module_of_file(path, sizes).inputs
        assert value.shape == (rows, 8)
    told = _refused(path, sequence_length=4)
    assert "--sequence-length: got 4, expected none" in told
    assert "write example_inputs as a function of sequence_length" in told
    fixed = _file(tmp_path, NET + INPUTS + "net = Net()\n", "fixed.py")
    assert "--image-size: got '8 x 9', expected none" in _refused(fixed, image_size=(8, 9))


@pytest.mark.parametrize(
    ("code", "name", "told"),
    [("", "", "got 'no module', expected one torch.nn.Module; make one in the file"),
     (NET, "", "example_inputs: got nothing, expected arguments of forward(x); add example_inputs"),
     (NET + "a, b = Net(), Net()", "", "got 'a, b', expected one torch.nn.Module; say which: "),
     (NET, ":Nett", "got 'Nett', expected one of Block, Net; did you mean "),
     (NET, ":", "got 'no name behind the colon'"),
     (NET, ":Block", "got 'the arguments width', expected none, or of batch"),
     (NET, ":torch", "got 'module', expected a torch.nn.Module"),
     ("def f(:\n", "", "got 'SyntaxError: invalid syntax (net.py:1)'"),
     ("\nraise ValueError('no weights\\nat all')", "", "'ValueError: no weights (net.py:2)'"),
     ("import sys; sys.exit(3)", "", 'keep what a script does under if __name__ == "__main__":'),
     ("import nothing_like_it", "", "ModuleNotFoundError: No module named 'nothing_like_it'"),
     ("from .other import x", "", "import the sibling by its name alone, or make the folder a"),
     (NET + "def build(): return 3", ":build", "net.py:build: got 'int', expected a torch.nn"),
     (NET + "def build(): 1 / 0", ":build", "ZeroDivisionError: division by zero (net.py:10)"),
     ("import torch\nclass Net(torch.nn.Module):\n    def __init__(self): pass\n" + INPUTS, "",
      "expected a module that is initialised; begin its __init__ with super().__init__()"),
     (NET + "example_inputs = 3", "", "example inputs: got 'int', expected a tensor"),
     (NET + "example_inputs = ((), {'y': 1})", "", "arguments of forward(x)")],
)  # fmt: skip
def test_a_mistake_is_one_line_with_what_mends_it(
    tmp_path: Path, code: str, name: str, told: str
) -> None:
    assert told in _refused(_file(tmp_path, code) + name)


def test_a_missing_file_gets_the_nearest_beside_it(tmp_path: Path) -> None:
    path = _file(tmp_path, NET)
    assert f"did you mean {path}?" in _refused(str(tmp_path / "nett.py"))
    assert "expected a file" in _refused(str(tmp_path / "no" / "net.py"))


def test_siblings_are_imported_by_name_and_in_a_package_from_it(tmp_path: Path) -> None:
    _file(tmp_path / "plain", NET, "layers_of_test.py")
    plain = "from layers_of_test import Net\nimport torch\nnet = Net()\n"
    assert module_of_file(_file(tmp_path / "plain", plain + INPUTS)).shape.endswith("[2, 8])")
    for name, code in (("__init__.py", ""), ("layers.py", NET)):
        _file(tmp_path / "of_a_package", code, name)
    within = "from .layers import Net\nimport torch\nnet = Net()\n"
    assert module_of_file(_file(tmp_path / "of_a_package", within + INPUTS)).weight_bytes == 288


def test_a_file_may_be_called_like_a_package(tmp_path: Path) -> None:
    before = sys.modules["torch"]
    code = (NET + INPUTS).replace("import torch\n", "import math\n", 1)
    code = code.replace("from torch import nn", "import torch\nfrom torch import nn")
    assert module_of_file(_file(tmp_path, code, "torch.py")).dtype == "fp32"
    assert sys.modules["torch"] is before


def test_a_script_sees_no_arguments_and_prints_to_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["foreplan", "predict", "net.py"])
    code = "import argparse; argparse.ArgumentParser().parse_args(); print('at the top')\n"
    code += NET + INPUTS + "if __name__ == '__main__':\n    raise SystemExit('as a script')\n"
    assert isinstance(module_of_file(_file(tmp_path, code)), GivenModule)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "at the top\n")
    assert sys.argv[1:] == ["predict", "net.py"]


def test_ctrl_c_in_a_file_is_ctrl_c(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        module_of_file(_file(tmp_path, "raise KeyboardInterrupt"))


class _Keywords(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor, shift: int = 0) -> torch.Tensor:
        result: torch.Tensor = self.body(x) * scale + shift
        return result


def test_arguments_and_keywords_come_as_torch_export_takes_them() -> None:
    x, scale = torch.zeros(2, 4), torch.ones(1)
    given = GivenModule.of("k", _Keywords(), ((x,), {"scale": scale}))
    assert given.shape == "inputs (x=float32[2, 4], scale=float32[1])"
    assert GivenModule.of("k", _Keywords(), ((x,), {})).inputs == (x,)
    with pytest.raises(SpecError, match="missing a required argument: 'scale'"):
        GivenModule.of("k", _Keywords(), ((x,), {"shift": 1}))


class _Passed(torch.nn.Module):
    """Hands on whatever it is given."""

    def forward(self, *values: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return sum(values, torch.zeros(1)) + sum(named.values())


class _Nameless(torch.nn.Module):
    def forward(self, x: torch.Tensor, /, y: torch.Tensor) -> torch.Tensor:
        return x + y


def test_arguments_without_names_stay_in_a_row() -> None:
    x, y = torch.zeros(2), torch.ones(2)
    assert GivenModule.of("k", _Nameless(), ((x,), {"y": y})).inputs == (x, y)
    given = GivenModule.of("k", _Passed(), ((), {"x": x, "y": y}))
    assert given.inputs == {"x": x, "y": y}
    with pytest.raises(SpecError, match="got 'values beside arguments by name'"):
        GivenModule.of("k", _Passed(), ((x,), {"y": y}))


def test_another_dtype_converts_weights_and_numbers_with_a_fraction() -> None:
    inputs = {"x": torch.zeros(2, 4), "scale": {"ids": torch.zeros(2, dtype=torch.int64)}}
    given = GivenModule.of("k", _Keywords(), inputs).converted("bf16")
    assert given.dtype == "bf16"
    assert given.weight_bytes == 2 * 20
    assert given.shape == "inputs (x=bfloat16[2, 4], scale={'ids': int64[2]})"
    with pytest.raises(SpecError, match="dtype: got 'int8', expected one of fp32, fp16, bf16"):
        given.converted("int8")


def test_lazy_layers_are_refused() -> None:
    with pytest.raises(SpecError, match="lazy layers without sizes"):
        GivenModule.of("k", torch.nn.LazyLinear(4), torch.zeros(2, 3))
