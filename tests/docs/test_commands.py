"""Commands that pages and examples print still exist: their words, options, modules and files.

`test_code_blocks` runs what is quick; results record commands of minutes and other machines, which
would grow stale unseen. Nothing is run here: options of ``foreplan`` are looked up in the frozen
surface of the command line, those of modules and scripts in their source.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SURFACE: dict[str, Any] = json.loads((ROOT / "tests" / "cli_surface.json").read_text())
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    + [p for p in (ROOT / "docs" / "examples").iterdir() if p.suffix in (".sh", ".py", ".md")]
)
#: A command of ours at the start of a line, in backticks or after another one, to the line's end.
COMMAND = re.compile(
    r"(?:^|(?<=[`|;&(]))(?=[ \t]*(?:(?:\w+=\S*|chrt -f \d+|taskset -c \S+|time|env)\s+)*"
    r"((?:foreplan(?! import)|python3?|bash|pytest|torchrun) [^`\n]*))",
    re.MULTILINE,
)
#: A file of the repository; outputs have other names.
FILE = re.compile(r"(docs|tests|datasets|cost_models|planner|notebooks)/[\w/.-]+")
#: Where another command begins.
END = {"|", "||", "&&", ";", "&", ">", ">>", "<", "2>", "2>&1", "#", "done", "then"}


def code(page: Path) -> str:
    """Code of a page: fenced, indented, and in backticks; a script is code as a whole."""
    text = page.read_text().replace("\\\n", " ")
    if page.suffix != ".md":
        return text
    kept, fenced = [], False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            kept.append(line)
        else:
            kept += re.findall(r"`[^`]+`", line)
    return "\n".join(kept)


def commands(text: str) -> Iterator[list[str]]:
    """Words of every command, up to where another begins."""
    for found in COMMAND.findall(text):
        try:
            words = shlex.split(found, comments=True)
        except ValueError:  # a quote that ends on another line
            words = found.split()
        for stop, word in enumerate(words):
            if word in END or word.endswith(";"):
                words = [*words[:stop], word.rstrip(";")] if word.endswith(";") else words[:stop]
                break
        yield words


def options(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]


def unknown_options(words: list[str], source: str) -> list[str]:
    """Options that a script does not name, be it as a field that its options are made of."""
    fields = 'f"--{' in source
    return [
        option
        for option in options(words)
        if f'"{option}"' not in source
        and not (fields and re.search(rf"\b{option.strip('-').replace('-', '_')}\b", source))
    ]


def wrong(words: list[str]) -> str | None:
    """What of a command does not exist; None for a sound one, or one that is not ours."""
    program, *rest = words
    if program == "foreplan":
        return _not_in_surface(rest)
    if rest[:1] == ["-m"] and rest[1:2]:
        module = rest[1]
        if not module.startswith(("foreplan.", "tests.")):
            return _no_file(rest[2:])
        found = importlib.util.find_spec(module)
        if found is None or found.origin is None:
            return f"no module {module}"
        unknown = unknown_options(rest[2:], Path(found.origin).read_text())
        return f"{module} has no {unknown}" if unknown else None
    script = ROOT / rest[0]
    if program.startswith("python") and script.suffix == ".py" and script.exists():
        unknown = unknown_options(rest[1:], script.read_text())
        return f"{rest[0]} has no {unknown}" if unknown else None
    return _no_file(rest)


def _not_in_surface(rest: list[str]) -> str | None:
    here: Any = SURFACE
    while isinstance(here, dict) and rest:
        word, *rest = rest
        if word.startswith(("-", "$", "…", "...", "<")):
            return None if word != "-" else "no command"
        if word not in here:
            return f"no command {word}"
        here = here[word]
    if isinstance(here, dict):
        return None  # a group, spoken of as a whole
    unknown = [option for option in options(rest) if option not in (*here, "--help")]
    return f"no option {unknown}" if unknown else None


def _no_file(rest: list[str]) -> str | None:
    for word in rest:
        path = word.partition("::")[0]
        if FILE.fullmatch(path) and not (ROOT / path).exists():
            return f"no file {path}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_of_a_page_exist(page: Path) -> None:
    stale = {" ".join(words): why for words in commands(code(page)) if (why := wrong(words))}
    assert not stale


def test_commands_are_found() -> None:
    found = [words for page in PAGES for words in commands(code(page))]
    assert sum(words[0] == "foreplan" for words in found) > 100
    assert sum(words[:2] == ["python", "-m"] for words in found) > 20


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("foreplan plan serving --models x", "no option"),
        ("foreplan devises", "no command"),
        ("foreplan simulate pipeline --stages 8 && foreplan predict x --rank", "no option"),
        ("python -m foreplan.cost_models.crossvalidation", "no module"),
        ("python -m foreplan.cost_models.operators.crossval --folds 3 --nonsense", "nonsense"),
        ("bash docs/examples/demonstration.sh out", "no file"),
        ("python tests/benchmarks/serving_passes.py cuda:0 --nonsense", "nonsense"),
    ],
)
def test_a_stale_command_is_seen(command: str, why: str) -> None:
    found = [wrong(words) for words in commands(command)]
    assert any(reason is not None and why in reason for reason in found), found
