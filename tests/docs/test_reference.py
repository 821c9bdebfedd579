"""No public name without documentation: docstrings of all, and a place in the reference."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml

import foreplan
import foreplan.testing

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REFERENCE = "\n".join(page.read_text() for page in sorted((DOCS / "reference").glob("*.md")))
LISTED = set(re.findall(r"^::: (foreplan[\w.]*)$", REFERENCE, re.MULTILINE))
PUBLIC = {f"foreplan.{name}" for name in foreplan.__all__ if not name.startswith("__")} | {
    f"foreplan.testing.{name}" for name in foreplan.testing.__all__
}


def value_of(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def parts(path: str) -> Iterator[tuple[str, Any]]:
    """A name and, of a class, what it defines for others to call."""
    value = value_of(path)
    yield path, value
    if inspect.isclass(value):
        for name, member in vars(value).items():
            if not name.startswith("_") and callable(member):
                yield f"{path}.{name}", member
            elif isinstance(member, (property, classmethod, staticmethod)) and name[0] != "_":
                yield f"{path}.{name}", getattr(member, "__func__", member)


@pytest.mark.parametrize("path", sorted(LISTED | PUBLIC))
def test_a_public_name_is_documented(path: str) -> None:
    assert path in LISTED, "add it to a page of docs/reference"
    for name, value in parts(path):
        if path != "foreplan.Work":  # a union of classes that are documented
            assert (inspect.getdoc(value) or "").strip(), f"{name} has no docstring"


@pytest.mark.parametrize("path", sorted(LISTED | PUBLIC))
def test_docstrings_say_what_the_arguments_are(path: str) -> None:
    """Every parameter of a function with more than one stands in its docstring."""
    for name, value in parts(path):
        if not inspect.isfunction(value):
            continue
        names = [n for n in inspect.signature(value).parameters if n not in ("self", "cls")]
        text = inspect.getdoc(value) or ""
        if len(names) > 1 and "Args:" in text:
            missing = [n for n in names if not re.search(rf"\b{n}\b", text)]
            assert not missing, f"{name} says nothing of {missing}"


def ours_in(hint: Any) -> Iterator[type]:
    """Classes of this package that an annotation speaks of."""
    if inspect.isclass(hint) and hint.__module__.startswith("foreplan."):
        yield hint
    for part in get_args(hint):
        yield from ours_in(part)


DOCUMENTED = {value_of(path) for path in LISTED | PUBLIC if path != "foreplan.Work"}
RECORDS = sorted(
    (v for v in DOCUMENTED if inspect.isclass(v) and issubclass(v, foreplan.StrictModel)),
    key=lambda record: record.__name__,
)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_what_a_documented_record_holds_is_documented(record: type) -> None:
    hints = get_type_hints(record)
    held = {part for name, hint in hints.items() if name[0] != "_" for part in ours_in(hint)}
    assert held <= DOCUMENTED, held - DOCUMENTED


@pytest.mark.parametrize("name", ["plan", "predict_latency", "rank_devices", "verify"])
def test_arguments_are_explained_by_public_names(name: str) -> None:
    """``as `replay_book` `` sends a reader of the page, or of an editor's hint, to the source."""
    text = inspect.getdoc(getattr(foreplan, name)) or ""
    sent = re.findall(r"\b(?:as|see) `(\w+)", text)
    assert {f"foreplan.{word}" for word in sent} <= PUBLIC


def test_what_a_run_gives_back_is_documented() -> None:
    returned = ours_in(get_type_hints(foreplan.verify)["return"])
    held = [
        part for hint in get_type_hints(foreplan.VerificationRun).values() for part in ours_in(hint)
    ]
    assert {*returned, *held} <= DOCUMENTED


def test_names_that_share_a_description_are_entries_of_their_own() -> None:
    griffe = pytest.importorskip("griffe")
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    code = "map(\n    rows, lambda: 0\n)\n"
    text = f"""{code}class A:
    \"\"\"A.

    Attributes:
        a, b, c: three
            of a kind.
        d: one.
    \"\"\"

    a: int
    b: str
    c: int
    d: float
"""
    shown = hooks.one_name_an_entry(text)
    assert code in shown
    read = griffe.visit("m", Path("m.py"), shown)["A"].docstring.parse("google")[1].value
    assert [(a.name, str(a.annotation), a.description) for a in read] == [
        ("a", "int", "three\nof a kind."),
        ("b", "str", "see `a`."),
        ("c", "int", "see `a`."),
        ("d", "float", "one."),
    ]


def test_no_error_class_is_private() -> None:
    errors = [n for n, v in vars(importlib.import_module("foreplan.errors")).items()
              if inspect.isclass(v) and issubclass(v, Exception)]  # fmt: skip
    assert {f"foreplan.{name}" for name in errors} <= PUBLIC


def test_glossary_is_in_alphabetical_order() -> None:
    text = (DOCS / "glossary.md").read_text()
    words = re.findall(r"^([A-Z][^\n]*)\n:   ", text, re.MULTILINE)
    assert {"Roofline", "Prefill", "Zoo"} <= set(words)
    assert words == sorted(words, key=str.lower)


def test_every_page_has_its_place() -> None:
    class Loader(yaml.SafeLoader):
        """Takes tags of the builder's own as text."""

    Loader.add_multi_constructor("tag:", lambda *_: None)
    text = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]  # noqa: S506 - a SafeLoader
    listed = {page for section in text for pages in section.values() for page in pages}
    made = {
        p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md") if p.parent.name != "results"
    }
    assert listed == made | {"results/README.md"}


PATHS = [
    (page.relative_to(ROOT).as_posix(), path)
    for page in sorted((DOCS / "concepts").glob("*.md"))
    for path in re.findall(
        r"`((?:solvers|planner|cost_models|datasets)/[\w/]+\.py)", page.read_text()
    )
]


@pytest.mark.parametrize(("page", "path"), PATHS)
def test_a_module_that_a_concept_names_exists(page: str, path: str) -> None:
    assert (ROOT / path).is_file()
