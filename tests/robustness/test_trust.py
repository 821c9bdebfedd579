"""No network, no pickle, no code from files: held over the source and over the commands."""

from __future__ import annotations

import ast
import re
import socket
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests.robustness.device_readers import PROFILES
from tests.robustness.plan_readers import plan_text
from typer.testing import CliRunner

from foreplan.cli import app

ROOT = Path(__file__).parents[2]
FOLDERS = ("src/foreplan", "planner", "cost_models", "datasets", "solvers")
FILES = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not any(part.is_symlink() for part in path.parents)
]

#: Modules that make code or objects from data, or that speak to strangers.
FORBIDDEN = {
    "pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "urllib.request",
    "http", "requests", "httpx", "ftplib", "smtplib", "code", "codeop", "runpy", "imp", "xmlrpc",
    "urllib3", "aiohttp", "huggingface_hub", "telnetlib", "pdb", "websockets", "socketserver",
}  # fmt: skip
#: Functions and methods that do.
CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load",
    "yaml.unsafe_load", "yaml.full_load", "torch.hub.load", "torch.save", "breakpoint",
    "runpy.run_path", "runpy.run_module",
}  # fmt: skip
#: Methods that do; torch.distributed's send pickled objects.
METHODS = {
    "read_pickle", "to_pickle", "all_gather_object", "broadcast_object_list", "gather_object",
    "scatter_object_list", "send_object_list", "recv_object_list",
}  # fmt: skip
#: Where a socket may be opened: ranks of a verification, those of one host that share memory, the
#: ends of a measured link, clusters and boards that the user names.
SOCKETS = {
    "planner/verify/wire.py", "planner/verify/launch.py", "datasets/ranks/links.py",
    "datasets/ranks/_link_rank.py", "datasets/ranks/_link_store.py", "datasets/ranks/host_group.py",
    "datasets/tir/rpc_site.py", "datasets/ranks/ray_cluster.py",
}  # fmt: skip


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _imported(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def _calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def _offences(tree: ast.AST, where: str) -> list[str]:
    """What in a module makes code or objects from data, or speaks to strangers."""
    imported = _imported(tree)
    found = [n for n in imported if n.split(".")[0] in FORBIDDEN or n in FORBIDDEN]
    if any(name.split(".")[0] == "socket" for name in imported) and where not in SOCKETS:
        found.append("socket")
    for call in _calls(tree):
        name = _name(call.func)
        last = name.rpartition(".")[2]
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        if name in CALLS or name.startswith("builtins.") or last in METHODS:
            found.append(name)
        if name in ("torch.load", "np.load", "numpy.load"):
            safe = given.get("weights_only" if name == "torch.load" else "allow_pickle")
            if not isinstance(safe, ast.Constant) or safe.value is not (name == "torch.load"):
                found.append(name)
        if "shell" in given and ast.unparse(given["shell"]) != "False":
            found.append(f"{name}(shell=...)")
        for word in ("trust_remote_code", "allow_pickle"):
            trusted = given.get(word)
            if isinstance(trusted, ast.Constant) and trusted.value is True:
                found.append(f"{name}({word}=True)")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_source_builds_no_code_from_data(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not _offences(tree, path.relative_to(ROOT).as_posix())


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from pickle import loads", "import joblib as j", "import socket",
        "from socket import create_connection", "from urllib import request",
        "import huggingface_hub", "eval(text)", "exec(text)", "builtins.eval(text)",
        "__import__(name)", "os.system(text)", "yaml.load(text)", "frame.to_pickle(path)",
        "torch.load(path)", "torch.load(path, weights_only=False)", "numpy.load(path)",
        "np.load(path, allow_pickle=True)", "subprocess.run(text, shell=True)", "run(x, shell=s)",
        "m.from_pretrained(path, trust_remote_code=True)", "torch.hub.load(name)",
        "runpy.run_path(path)", "import pdb", "breakpoint()", "torch.save(x, path)",
        "np.save(path, x, allow_pickle=True)", "dist.all_gather_object(found, x)",
    ],
)  # fmt: skip
def test_what_must_not_be_there_would_be_seen(line: str) -> None:
    assert _offences(ast.parse(line), "planner/plan.py")


def test_modules_are_imported_by_names_of_the_source_alone() -> None:
    """``import_module`` gets a constant, an own table's entry, or the package's own name."""
    callers = set()
    for path in FILES:
        for call in _calls(ast.parse(path.read_text(encoding="utf-8"))):
            if _name(call.func).rpartition(".")[2] == "import_module":
                argument = call.args[0]
                if not isinstance(argument, ast.Constant):
                    callers.add(path.relative_to(ROOT).as_posix())
    assert callers == {
        "src/foreplan/__init__.py",
        "planner/installed.py",
        "datasets/kernels/quantise.py",
        "datasets/tir/toolchain.py",
        "datasets/graphs/python_file.py",
    }


def test_a_users_file_is_run_by_predict_alone() -> None:
    """The command line's ``predict FILE.py`` asks for it; no document, folder or API call does."""
    runs, asks = set(), set()
    for path in FILES:
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        runs |= {name for call in _calls(ast.parse(text)) if "exec_module" in _name(call.func)}
        asks |= {name} if "graphs.python_file import" in text else set()
    assert runs == {"datasets/graphs/python_file.py"}
    assert asks == {"cost_models/predict_command.py"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_transformers_reads_data_from_the_disk_alone(path: Path) -> None:
    """Else a folder's ``auto_map`` asks to run its code, and a lacking file is looked up online."""
    text = path.read_text(encoding="utf-8")
    names = [_name(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
    readers = [name for name in names if re.fullmatch(r"transformers\.\w+\.from_pretrained", name)]
    assert text.count("**LOCAL_DATA") == len(readers)
    assert text.count("use_safetensors=True") == sum("Model" in name for name in readers)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **_: Any) -> NoReturn:
        raise AssertionError(f"a socket: {arguments}")

    for name in ("connect", "connect_ex", "bind", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


@pytest.mark.usefixtures("no_network")
def test_commands_ask_no_network(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(plan_text("serving"))
    plan, out = str(tmp_path / "plan.json"), str(tmp_path / "out")
    asked = "batch=2,prompt_tokens=8,new_tokens=2"
    serving = ["-m", "tiny-llama-random", "-d", "2xt4", "-w", asked]
    commands = [
        ["devices"],
        ["devices", "t4"],
        ["simulate", "pipeline", "--schedule", "1f1b", "--stages", "2", "--microbatches", "2",
         "--forward-ms", "1", "--backward-input-ms", "1", "--backward-weight-ms", "1"],
        ["plan", "serving", *serving, "--costs", "roofline", "-o", out + ".json"],
        ["verify", plan, "--dry-run"],
        ["report", plan, "-o", out + ".html"],
        ["export", plan, "--to", "torchrun", "-o", out],
        ["cluster", "merge", *2 * [str(PROFILES / "cluster.yaml")], "-o", out + ".yaml"],
        ["predict", "gpt2", "-d", "t4", "--costs", "roofline"],
    ]  # fmt: skip
    for command in commands:
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, (command, result.output, result.exception)
