"""Settings of the whole test run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Compiling and machines shared with others make single examples slow at random; on CI the examples
# are the same in every run.
settings.register_profile(
    "foreplan", deadline=None, max_examples=60, derandomize="CI" in os.environ
)
settings.load_profile("foreplan")

#: Files whose tests start several processes, pin cores or compare times: a neighbour on the same
#: cores would make them slow or wrong.
SERIAL = (
    "datasets/test_links.py",
    "datasets/test_measuring.py",
    "datasets/test_profile.py",
    "planner/test_fourth_planner.py",
    "planner/verify/test_placement.py",
    "planner/verify/test_runtime.py",
    "planner/verify/test_verify.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what has to run alone; ``make test`` runs it after the rest, in one process."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and item.path.relative_to(here).as_posix() in SERIAL:
            item.add_marker("serial")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads gain nothing on small tensors and wait for each other on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
