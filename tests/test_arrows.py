"""Imports go one way; read from the source by ast. What is unsafe: `robustness.test_trust`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: What each folder may import of ours: the table of the architecture. ``top`` is src/foreplan.
MAY_IMPORT = {
    "errors": set(),
    "_compiled": set(),
    "datasets": {"datasets", "errors", "_compiled"},
    "cost_models": {"cost_models", "datasets", "errors", "_compiled"},
    "solvers": {"solvers", "errors", "_compiled"},
    "planner": {"planner", "solvers", "cost_models", "datasets", "errors", "_compiled", "top"},
    "top": {"planner", "solvers", "cost_models", "datasets", "errors", "_compiled", "top"},
}
#: Solvers work on arrays: no frameworks, files or processes.
NOT_IN_SOLVERS = {"torch", "tvm", "transformers", "pathlib", "os", "io", "json", "subprocess"}


def modules() -> Iterator[tuple[str, Path]]:
    """(folder or top-level module, file) of all our code."""
    for folder in ("datasets", "cost_models", "solvers", "planner"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield folder, path
    for path in sorted((ROOT / "src/foreplan").rglob("*.py")):
        yield (path.stem if path.stem in MAY_IMPORT else "top"), path


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


ALL = [pytest.param(folder, path, id=name_of(path)) for folder, path in modules()]


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of every import, lazy ones and those for type checkers included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            # importlib.import_module("foreplan...")
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            first = node.args[0]
            if called == "import_module" and isinstance(first, ast.Constant):
                yield str(first.value)


def ours(name: str) -> str | None:
    """Which of our parts an imported name belongs to."""
    parts = name.split(".")
    if parts[0] != "foreplan":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else "top"


def test_there_is_something_to_check() -> None:
    assert {folder for folder, _ in modules()} == set(MAY_IMPORT)


@pytest.mark.parametrize(("folder", "path"), ALL)
def test_imports_go_one_way(folder: str, path: Path) -> None:
    for name in imported(ast.parse(path.read_text())):
        part = ours(name)
        assert part is None or part in MAY_IMPORT[folder], f"{name_of(path)} imports {name}"
        top = name.split(".")[0]
        assert top not in ("datasets", "cost_models", "planner", "solvers"), "import foreplan.…"
        if folder == "solvers":
            assert top not in NOT_IN_SOLVERS, f"{name_of(path)} imports {name}"
