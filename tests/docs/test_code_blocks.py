"""Every ``python`` and ``bash`` block of the documentation runs, page by page in order.

Blocks of a page share a folder and their names. ``docs/results`` is left out: it records commands
that take minutes. ``<!--- skip: next "why" -->`` before a block leaves it out, with a reason.
"""

from __future__ import annotations

import os
import subprocess
import sys
import unittest
from pathlib import Path

import pytest
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

ROOT = Path(__file__).parents[2]


def run_bash(example: Example) -> None:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "100",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", example.parsed],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{example.parsed}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


SYBIL = Sybil(
    [PythonCodeBlockParser(), CodeBlockParser(language="bash", evaluator=run_bash), SkipParser()]
)


PAGES = {
    page.relative_to(ROOT).as_posix(): [*SYBIL.parse(page).examples()]
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "results" not in page.parts
}
WITH_BLOCKS = [name for name, blocks in PAGES.items() if blocks]


@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_page(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").symlink_to(ROOT / "docs")  # examples are named as from the checkout
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    for example in PAGES[page]:
        try:
            example.evaluate()
        except unittest.SkipTest:  # a block that says why it cannot run here
            continue


def test_blocks_are_found() -> None:
    assert len(WITH_BLOCKS) > 10
    assert sum(len(blocks) for blocks in PAGES.values()) > 30
