"""Whatever a file holds, a reader answers with a result or one line; see `guard.bounded`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.robustness.guard import outcome
from tests.robustness.readers import readers

READERS = readers()
#: Mutants of each reader's input at every change; `fuzz` runs as many as one likes.
CASES = 15


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("fuzz")
    return made / "input"


@pytest.mark.parametrize("name", READERS)
def test_what_is_valid_is_read(name: str, folder: Path) -> None:
    reader = READERS[name]
    assert outcome(partial(reader.attempt, folder, reader.valid_bytes())) is None


@pytest.mark.parametrize("name", READERS)
@settings(
    max_examples=CASES, derandomize=True, database=None, deadline=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(seed=st.integers(0, (1 << 32) - 1))
def test_what_is_broken_is_refused_in_one_line(name: str, folder: Path, seed: int) -> None:
    reader = READERS[name]
    outcome(partial(reader.attempt, folder, reader.mutant(seed)))
