"""What the wheel holds, what the checkout links, and what an import loads."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

import foreplan

ROOT = Path(__file__).parents[1]
FOLDERS = ("cost_models", "datasets", "planner", "solvers")
FRAMEWORKS = {"torch", "tvm", "transformers", "matplotlib"}

in_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the repository")


def _extract(archive: tarfile.TarFile, folder: Path) -> None:
    """Extract data alone; Python before 3.11.4 knows no filters."""
    if hasattr(tarfile, "data_filter"):
        archive.extraction_filter = tarfile.data_filter
    archive.extractall(folder)


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout


def build(kind: str, source: Path, target: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)],
        cwd=source, check=True, capture_output=True,
    )  # fmt: skip
    (made,) = target.iterdir()
    return made


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The committed files, without git around them."""
    folder = tmp_path_factory.mktemp("source")
    with tarfile.open(fileobj=io.BytesIO(git("archive", "HEAD"))) as archive:
        _extract(archive, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(committed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", committed, tmp_path_factory.mktemp("wheel"))


def tracked() -> set[str]:
    """Committed files that belong into the wheel, by their name in it."""
    names = set()
    for line in git("ls-tree", "-r", "HEAD").decode().splitlines():
        mode, path = line.split()[0], line.split("\t", 1)[1]
        parts = PurePosixPath(path).parts
        if parts[:2] == ("datasets", "measured") and "_programs" in parts[2]:
            continue  # training data stays in the repository
        if parts[0] in FOLDERS:
            names.add(f"foreplan/{path}")
        elif parts[:2] == ("src", "foreplan") and mode != "120000" and parts[2] != "_empty.py":
            names.add("/".join(parts[1:]))
    return names


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@in_git
def test_wheel_holds_every_committed_file_and_four_inits(wheel: Path) -> None:
    inits = {f"foreplan/{folder}/__init__.py" for folder in FOLDERS}
    assert contents(wheel) == tracked() | inits
    assert {"foreplan/py.typed", "foreplan/datasets/zoo/models.yaml"} <= contents(wheel)
    with zipfile.ZipFile(wheel) as archive:
        assert all(b"import" not in archive.read(name) for name in inits)
        (entry_points,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
        assert b"foreplan = foreplan.cli:main" in archive.read(entry_points)


@in_git
def test_wheel_of_a_checkout_without_links_and_with_caches(
    committed: Path, wheel: Path, tmp_path: Path
) -> None:
    """As from a zip on Windows: links are files that hold their target."""
    source = tmp_path / "source"
    with tarfile.open(fileobj=io.BytesIO(git("archive", "HEAD"))) as archive:
        _extract(archive, source)
    for folder in FOLDERS:
        link = source / "src/foreplan" / folder
        target = os.readlink(link)
        link.unlink()
        link.write_text(target)
        cache = source / folder / "__pycache__"
        cache.mkdir()
        for name in ("old.cpython-311.pyc", "loop.nbi", "loop.1.nbc"):
            (cache / name).write_bytes(b"")
    made = build("wheel", source, tmp_path / "out")
    assert contents(made) == contents(wheel)


@in_git
def test_sdist_builds_the_same_wheel(committed: Path, wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", committed, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        _extract(archive, tmp_path)
    (source,) = tmp_path.glob("foreplan-*")
    assert contents(build("wheel", source, tmp_path / "out")) == contents(wheel)
    assert (source / "tests/test_packaging.py").is_file()


@in_git
def test_wheel_works_where_nothing_can_be_written(wheel: Path, tmp_path: Path) -> None:
    """Neither beside the modules nor in the user's folders: inner loops compile in memory."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # A file where numba would make its folder stops root too, unlike permissions.
    (site / "foreplan/cost_models/__pycache__").write_text("")
    blocked = tmp_path / "home"
    blocked.write_text("")
    code = """
import foreplan
from foreplan.cost_models import pipeline, simulator
from foreplan.cost_models.tree_ensemble import TreeEnsemble
from foreplan.solvers import chain_partition
schedule = pipeline.pipeline_schedule("1f1b", stages=2, microbatches=2)
timeline = simulator.simulate(schedule, pipeline.given_costs(1.0, 1.0, 1.0, 0.0))
print(foreplan.__file__, timeline.makespan_s)
"""
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA", "XDG"))}
    run = subprocess.run(
        [sys.executable, "-B", "-c", code], cwd=tmp_path, check=True, text=True,
        capture_output=True, env={**keep, "PYTHONPATH": str(site), "HOME": str(blocked)},
    )  # fmt: skip
    assert run.stdout.split() == [str(site / "foreplan/__init__.py"), "9.0"]


@pytest.mark.skipif(not (ROOT / "src/foreplan/solvers").is_symlink(), reason="no links here")
def test_links_lead_to_the_four_folders() -> None:
    for folder in FOLDERS:
        link = ROOT / "src/foreplan" / folder
        assert os.readlink(link) == f"../../{folder}"
        assert link.resolve() == ROOT / folder
        # It would shadow Hugging Face's ``datasets`` for anyone who works in the checkout.
        assert not (ROOT / folder / "__init__.py").exists()


def test_subfolders_are_packages() -> None:
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            if path.parent != ROOT / folder:
                assert (path.parent / "__init__.py").is_file(), f"{path.parent} has no __init__.py"


def loaded_by(code: str) -> set[str]:
    """Top-level modules that are loaded after running code in a fresh interpreter."""
    code += "\nimport sys, json; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(json.loads(out.stdout))


def test_importing_foreplan_or_a_solver_loads_no_framework() -> None:
    solvers = [p.stem for p in sorted((ROOT / "solvers").glob("*.py"))]
    lines = ["import foreplan, foreplan.cli", *(f"import foreplan.solvers.{s}" for s in solvers)]
    lines += ["import foreplan.cost_models.simulator", "foreplan.Plan, foreplan.Cluster"]
    assert len(solvers) > 3
    assert not loaded_by("\n".join(lines)) & FRAMEWORKS
    assert not loaded_by("import foreplan") & {"numpy", "numba", "pydantic", "pandas"}


def test_only_the_programmes_of_a_milp_solver_load_one() -> None:
    solvers = {p.stem for p in (ROOT / "solvers").glob("*.py")}
    programmes = {s for s in solvers if s.endswith("_milp")}
    assert len(programmes) > 2
    lines = [f"import foreplan.solvers.{s}" for s in sorted(solvers - programmes - {"_highs"})]
    lines += [f"import foreplan.planner.{kind}" for kind in ("bubbles", "precision", "serving")]
    frameworks = {"pulp", "highspy", "ortools", "sklearn", "pandas", "xgboost", *FRAMEWORKS}
    assert not loaded_by("\n".join(lines)) & frameworks


def test_public_names() -> None:
    assert foreplan.__all__ == sorted(foreplan.__all__)
    assert set(foreplan.__all__) <= set(dir(foreplan))
    for name in foreplan.__all__:
        value = getattr(foreplan, name)
        assert getattr(foreplan, name) is value
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        foreplan.nothing  # noqa: B018


def test_type_checkers_see_the_public_names() -> None:
    tree = ast.parse((ROOT / "src/foreplan/__init__.py").read_text())
    seen = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {*seen, "__version__"} == set(foreplan.__all__)
    assert seen == {name: f"foreplan.{module}" for name, module in foreplan._HOME.items()}


def third_party() -> Iterator[tuple[Path, str]]:
    local = {"foreplan", *FOLDERS}
    for folder in (*FOLDERS, "src/foreplan"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names: list[str] = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [str(node.module)]
                for name in {n.split(".")[0] for n in names} - sys.stdlib_module_names - local:
                    yield path, name


def plain(requirement: str) -> str:
    """Name of a distribution as an index compares it."""
    return re.split(r"[<>=\[;]", requirement)[0].lower().replace("_", "-")


#: Used where it happens to be installed; its absence is caught.
OPTIONAL = {"pynvml", "triton"}
#: What `pip install foreplan[...]` brings; imported only where it is asked for.
EXTRAS = ("cp", "ray")


def test_every_import_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [d for extra in EXTRAS for d in project["optional-dependencies"][extra]]
    declared = {plain(d) for d in [*project["dependencies"], *extras]}
    distribution = {
        "yaml": "pyyaml", "sklearn": "scikit-learn", "tvm": "apache-tvm",
        "tvm_ffi": "apache-tvm-ffi", "pydantic_core": "pydantic",
    }  # fmt: skip
    for path, name in third_party():
        assert name in OPTIONAL or plain(distribution.get(name, name)) in declared, (
            f"{path.name} imports {name}"
        )


def test_constraints_pin_every_dependency_and_name_no_host() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        wanted += extra
    text = (ROOT / "constraints.txt").read_text()
    assert "://" not in text
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", line) for line in lines)
    assert {plain(d) for d in wanted} <= {plain(line) for line in lines}
