"""Notebooks are committed without outputs; ``make test`` executes them with nbmake."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def test_six_notebooks_in_order() -> None:
    assert [path.name[:2] for path in NOTEBOOKS] == [f"{n}_" for n in range(1, 7)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_no_outputs_are_committed(path: Path) -> None:
    """After running one: jupyter nbconvert --clear-output --inplace NOTEBOOK."""
    notebook = json.loads(path.read_text())
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    for cell in notebook["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
        assert not cell["metadata"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_links_lead_to_files(path: Path) -> None:
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            for target in re.findall(r"\]\(([^)]+)\)", text):
                assert (path.parent / target).is_file(), target
            for target in re.findall(r"`(docs/[^`]+)`", text):
                assert (path.parents[1] / target).is_file(), target
