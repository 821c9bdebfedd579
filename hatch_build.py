"""Build hook: gives each of the four folders an ``__init__.py`` in the wheel, and only there.

The folders carry none in the repository, where ``datasets/__init__.py`` would shadow other packages
of that name; in a wheel, tools that walk packages (pkgutil, griffe, import-linter) need one.
hatchling's ``force-include`` names a target by its source, so that one file can go to one place
only; hence one copy of ``_empty.py`` a folder, outside the repository and gone after the build.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDERS = ("cost_models", "datasets", "planner", "solvers")


class InitFiles(BuildHookInterface[Any]):
    """Adds ``foreplan/<folder>/__init__.py`` to a wheel that is no editable one."""

    _copies: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before a wheel is built; ``version`` is its kind."""
        if version == "editable":  # the links of the checkout are imported, as namespace packages
            return
        self._copies = Path(tempfile.mkdtemp())
        for folder in FOLDERS:
            copy = self._copies / f"{folder}.py"
            shutil.copyfile(Path(self.root, "src", "foreplan", "_empty.py"), copy)
            build_data["force_include"][str(copy)] = f"foreplan/{folder}/__init__.py"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called by hatchling after the wheel was written."""
        if self._copies is not None:
            shutil.rmtree(self._copies)
