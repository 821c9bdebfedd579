"""Hooks of the documentation's build: the package as a wheel lays it out, results, and the CLI.

The four folders of the checkout have no ``__init__.py`` (see CONTRIBUTING), so that griffe, which
reads the docstrings, does not take them for packages; it reads a copy that has them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

FOLDERS = ("cost_models", "datasets", "planner", "solvers")
ROOT = Path(__file__).parents[1]
DOCSTRING = re.compile(r'""".*?"""', re.DOTALL)
#: Lines of one that describe several attributes or arguments together.
SHARED = re.compile(r"^( +)(\w+)((?:, \w+)+)(: .*(?:\n\1 +.*)*)", re.MULTILINE)


@event_priority(100)  # before mkdocstrings looks which of its paths exist
def on_config(config: Any) -> Any:
    """Copy the package for griffe, and list the pages of ``docs/results`` by their titles."""
    source = ROOT / "out" / "docs-source" / "foreplan"
    shutil.rmtree(source, ignore_errors=True)
    only_code = shutil.ignore_patterns("__pycache__", "measured", "zoo", "pretrained*", *FOLDERS)
    shutil.copytree(ROOT / "src" / "foreplan", source, ignore=only_code)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=only_code)
        (source / folder / "__init__.py").touch()
    for module in source.rglob("*.py"):
        module.write_text(one_name_an_entry(module.read_text()))
    (section,) = (entry["Results"] for entry in config.nav if "Results" in entry)
    pages = sorted((ROOT / "docs" / "results").glob("*.md"))
    section += [f"results/{page.name}" for page in pages if page.name != "README.md"]
    return config


def one_name_an_entry(source: str) -> str:
    """A module whose docstrings describe ``low_s, high_s: ...`` in two entries.

    Griffe would take the second name for the first one's type.
    """

    def apart(found: re.Match[str]) -> str:
        indent, first, others, text = found.groups()
        entries = [f"{indent}{other}: see `{first}`." for other in others[2:].split(", ")]
        return "\n".join([f"{indent}{first}{text}", *entries])

    return DOCSTRING.sub(lambda text: SHARED.sub(apart, text[0]), source)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put every command's help where the CLI page asks for it."""
    if "{{ commands }}" in markdown:
        markdown = markdown.replace("{{ commands }}", "\n\n".join(_commands()))
    return markdown


def _commands() -> Iterator[str]:
    import typer

    from foreplan.cli import app

    def walk(command: Any, path: str) -> Iterator[str]:
        if hasattr(command, "commands"):
            for name, below in sorted(command.commands.items()):
                yield from walk(below, f"{path} {name}")
            return
        yield f"## `{path}`\n\n{command.help}"
        rows = []
        for parameter in command.params:
            flag = parameter.param_type_name == "option"
            names = ", ".join(f"`{n}`" for n in (*parameter.opts, *parameter.secondary_opts))
            words = names if flag else f"`{parameter.metavar or parameter.name.upper()}`"
            value = parameter.default
            default = "" if value in (None, False, (), []) or callable(value) else f"`{value}`"
            meaning = (getattr(parameter, "help", None) or "").replace("|", "\\|")
            rows.append(f"| {words} | {meaning} | {default} |")
        yield "\n".join(("| argument | meaning | default |", "|---|---|---|", *rows))

    yield from walk(typer.main.get_command(app), "foreplan")
